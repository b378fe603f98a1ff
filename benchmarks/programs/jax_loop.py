"""Loop on JAX by hand, as an expert would write it.

One jitted function of all state, which is donated, over a mesh; the compiler puts the
collectives.
"""

from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.cases import Case, loss, optimizer
from benchmarks.programs import Train


def by_hand(case: Case) -> Train:
    """Return a jitted step over a mesh that returns the mean loss."""
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    whole = NamedSharding(mesh, PartitionSpec())
    rows = NamedSharding(mesh, PartitionSpec("batch"))
    keras.utils.set_random_seed(0)
    model, adam, loss_fn = case.build(), optimizer(), loss()
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    adam.build(model.trainable_variables)
    variables = (
        model.trainable_variables,
        model.non_trainable_variables,
        adam.variables,
        accuracy.variables,
    )
    state: Any = [[jax.device_put(v.value, whole) for v in vs] for vs in variables]

    def loss_of(trainable, frozen, x, y):
        logits, frozen = model.stateless_call(trainable, frozen, x, training=True)
        return loss_fn(y, logits), (logits, frozen)

    def step(state, x, y):
        trainable, frozen, slots, counts = state
        (value, (logits, frozen)), gradients = jax.value_and_grad(
            loss_of, has_aux=True
        )(trainable, frozen, x, y)
        trainable, slots = adam.stateless_apply(slots, gradients, trainable)
        counts = accuracy.stateless_update_state(counts, y, logits)
        return [trainable, frozen, slots, counts], value

    compiled = jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(whole, rows, rows),
        out_shardings=(whole, whole),
    )

    def train(steps: int) -> None:
        nonlocal state
        value = None
        for batch in case.batches(steps):
            state, value = compiled(state, *jax.device_put(batch, rows))
        jax.block_until_ready((state, value))

    return train
