"""Where torch's optimizers of Keras do a step in one pass."""

from typing import Any

import keras
import torch

from keras_strategy.backends.torch import fused
from keras_strategy.hooks.conditions import in_replica
from keras_strategy.hooks.hook import home_of, hook

Adam: Any = home_of("Adam", "keras.src.backend.torch.optimizers.torch_adam").Adam


def _in_one_pass(adam, tensors_of, grads, variables, learning_rate) -> bool:
    """Does Adam's step with torch's kernel, if that takes what there is.

    Args:
        adam: The optimizer.
        tensors_of: Gives the tensors of variables that are about to be written to.
        grads: The gradients.
        variables: The variables.
        learning_rate: The learning rate.
    """
    kept = [adam._momentums, adam._velocities]
    if adam.amsgrad:
        kept.append(adam._velocity_hats)
    indices = [adam._get_variable_index(variable) for variable in variables]
    slots = [slot[index] for slot in kept for index in indices]
    tensors = tensors_of([*variables, *slots])
    if not fused.kernel_accepts(grads, tensors):
        return False
    dtype = variables[0].dtype
    step = keras.ops.cast(keras.ops.convert_to_tensor(adam.iterations) + 1, dtype)
    rate = keras.ops.cast(learning_rate, dtype)
    fused.fused_adam_step(
        tensors, grads, rate, step, (adam.beta_1, adam.beta_2), adam.epsilon
    )
    return True


def _is_keras_adam() -> bool:
    """Whether the kernel gives what this Keras's own step gives."""

    def in_one_pass(adam, *args):
        _in_one_pass(adam, lambda variables: [v.value for v in variables], *args)

    found = []
    for step in (Adam._parallel_update_step, in_one_pass):
        variable = keras.Variable([1.0, -2.0, 0.5], dtype="float32", name="trial")
        adam = keras.optimizers.Adam(amsgrad=True, epsilon=0.1, name="trial")
        adam.build([variable])
        for gradient in ([3.0, 1e-3, -2.0], [0.0, -1.0, -2.0]):
            tensor = torch.tensor(gradient, device=variable.value.device)
            with torch.no_grad():
                step(adam, [tensor], [variable], 0.5)
            adam.iterations.assign_add(1)
        found.append(variable.value.detach())
    return torch.allclose(*found, rtol=1e-5)


@hook(
    Adam,
    "_parallel_update_step",
    "(self, grads, variables, learning_rate)",
    when=in_replica,
    needed=_is_keras_adam,
)
def _update(original, replica, self, grads, variables, learning_rate):
    """Each replica updates a copy of its own: in one pass, where Keras makes twelve."""
    if not replica.sees_replica_variables() or not _in_one_pass(
        self, replica.tensors_to_update, grads, variables, learning_rate
    ):
        original(self, grads, variables, learning_rate)
