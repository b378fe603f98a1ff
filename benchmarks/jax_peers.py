"""Peer of the jax backend: a loop written by hand.

It is what an expert of JAX would write: one jitted function of all state, which is
donated, over a mesh; the compiler puts the collectives.
"""

import itertools
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.cases import Case, loss, optimizer
from benchmarks.programs import Train

# Of one epoch; both programs go round them.
BATCHES = 16


def batches(case: Case) -> list[tuple[np.ndarray, np.ndarray]]:
    x, y = case.rows(BATCHES * case.batch)
    return [
        (x[begin : begin + case.batch], y[begin : begin + case.batch])
        for begin in range(0, len(x), case.batch)
    ]


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
    data = batches(case)

    def train(steps: int) -> None:
        nonlocal state
        value = None
        for x, y in itertools.islice(itertools.cycle(data), steps):
            x, y = jax.device_put((x, y), rows)
            state, value = compiled(state, x, y)
        jax.block_until_ready((state, value))

    return train
