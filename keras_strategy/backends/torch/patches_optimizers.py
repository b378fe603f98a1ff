"""Adam in one pass over memory, by the kernel that torch has for it.

Every replica updates its own copy of the variables, so an update costs once for each of
them. Keras makes about twelve passes over all variables.

Where torch's optimizers of Keras do a step in one pass.

Where the torch adapter extends Keras for what an optimizer's replicas share.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch

from keras_strategy.backends.threads.patches import (
    current_stateless_scope,
    current_thread_replica,
)
from keras_strategy.backends.threads.patches_sharded_update import ShardedUpdateScope
from keras_strategy.backends.threads.patches_sharding import (
    apply_outside_replicas_error,
    optimizer_sharding_of,
)
from keras_strategy.backends.torch.replica import TorchReplica
from keras_strategy.backends.torch.sharding import (
    Updated,
    gather_updated_weights,
    gradient_shard,
    local_shard,
)
from keras_strategy.keras_patches.patch import home_of, hook, in_replica
from keras_strategy.values import ReduceOp

# That of `torch.optim.Adam(fused=True)`, for all tensors at once.
_adam: Callable[..., Any] = torch._fused_adam_  # pyright: ignore
# The kernel divides by 1 - beta**step, which this step makes 1.
_NO_CORRECTION = float("inf")


def kernel_accepts(
    gradients: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> bool:
    """Whether the kernel takes these tensors.

    Args:
        gradients: One or more gradients.
        tensors: What they update.
    """
    first, every = gradients[0], [*gradients, *tensors]
    return (
        first.is_floating_point()
        and first.layout is torch.strided
        and len({(t.dtype, t.device, t.layout) for t in every}) == 1
        and all([t.is_contiguous() for t in every])
    )


def fused_adam_step(
    tensors: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    rate: torch.Tensor,
    step: torch.Tensor,
    betas: tuple[float, float],
    epsilon: float,
) -> None:
    """Updates variables and what Adam keeps of them, in place.

    The formula is Keras's, that of Kingma and Ba, 2014, before their section 2.1:
    variable -= alpha * momentum / (sqrt(velocity) + epsilon), where alpha is
    rate * sqrt(1 - beta_2**step) / (1 - beta_1**step). torch corrects the slots
    themselves, and has another epsilon; so it is told not to correct, and its learning
    rate is alpha.

    Args:
        tensors: The variables' tensors, then their momentums, their velocities, and
            with amsgrad the largest of these, all in the variables' order.
        gradients: The variables' gradients.
        rate: The learning rate, a scalar of the variables' dtype.
        step: The number of the step, from 1 on, likewise.
        betas: How much of momentums and velocities is kept.
        epsilon: What is added to the denominator.
    """
    # In the variables' dtype, as Keras does, where 0.999 is another number.
    alpha = rate * torch.sqrt(1 - torch.pow(betas[1], step))
    alpha = alpha / (1 - torch.pow(betas[0], step))
    count = len(gradients)
    number = torch.full((), _NO_CORRECTION, device=step.device)
    _adam(
        list(tensors[:count]),
        list(gradients),
        list(tensors[count : 2 * count]),
        list(tensors[2 * count : 3 * count]),
        list(tensors[3 * count :]),
        [number] * count,
        lr=alpha,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=0.0,
        eps=epsilon,
        amsgrad=len(tensors) > 3 * count,
        maximize=False,
    )


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
    if not kernel_accepts(grads, tensors):
        return False
    dtype = variables[0].dtype
    step = keras.ops.cast(keras.ops.convert_to_tensor(adam.iterations) + 1, dtype)
    rate = keras.ops.cast(learning_rate, dtype)
    fused_adam_step(
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


class _Shared(ShardedUpdateScope):
    """See `ShardedUpdateScope`.

    Args:
        replica: The replica.
        shares: What the replica updates, by the variables' `id`.
        variables: These variables.
        numbers: Of the gradients that it is given, the numbers among those of all
            replicas.
        count: How many gradients these are.
    """

    def __init__(
        self,
        replica: TorchReplica,
        shares: dict[int, torch.Tensor],
        variables: Sequence[Any],
        numbers: Sequence[int],
        count: int,
    ):
        super().__init__(replica.scope, shares, variables)
        self._replica, self._numbers, self._count = replica, numbers, count

    def write(self, variable: Any, value: torch.Tensor) -> None:
        self.shares[id(variable)].copy_(value)

    def squared_norms(self, squares: Sequence[Any]) -> tuple[list[Any], Any]:
        each: Any = torch.zeros(self._count, device=self._replica.scope.device)
        if squares:
            each[list(self._numbers)] = torch.stack(list(squares)).to(each)
        with self.whole_shapes():
            each = self._replica.all_reduce(ReduceOp.SUM, each)
        return [each[number] for number in self._numbers], torch.sum(each)


@hook(
    keras.optimizers.Optimizer,
    "_backend_apply_gradients",
    "(self, grads, trainable_variables)",
    when=optimizer_sharding_of,
)
def _apply_gradients(original, division, self, grads, trainable_variables):
    """Each replica updates its share, by Keras's own code.

    Before it the gradients were summed, and their loss unscaled. After it the weights
    are whole again, so that constraints are of whole weights.
    """
    replica = current_thread_replica()
    if replica is None or not replica.sees_replica_variables():
        scope = current_stateless_scope()
        if scope is None or id(division.slots[0]) not in scope.state_mapping:
            raise apply_outside_replicas_error(self)
        return original(self, grads, trainable_variables)
    weights = [v for v in self._trainable_variables if not v.overwrite_with_gradient]
    variables = [*weights, *division.slots]
    tensors = replica.tensors_to_update(variables)
    parts, updated = {}, {}
    for variable, tensor in zip(variables, tensors, strict=True):
        parts[id(variable)] = tensor.detach()
    for weight in weights:
        tensor, shares = parts[id(weight)], division.shards_for(weight, weight.shape)
        parts[id(weight)] = local_shard(tensor, shares, replica.id)
        updated[id(weight)] = Updated(tensor, parts[id(weight)], shares)
    numbers = division.gradient_indices(replica.id, trainable_variables)
    of_own = [trainable_variables[number] for number in numbers]
    own = [
        gradient_shard(grads[number], updated[id(weight)].shares, replica.id)
        for number, weight in zip(numbers, of_own, strict=True)
    ]
    scope = _Shared(replica, parts, variables, numbers, len(grads))
    with torch.no_grad():
        with scope, scope.shapes(), replica.updating(scope):
            original(self, own, of_own)
        changed = weights if self.ema_overwrite_frequency else trainable_variables
        gather_updated_weights(replica, [updated[id(weight)] for weight in changed])
