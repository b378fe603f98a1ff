"""Peers of the jax backend: Keras's DataParallel, and a loop written by hand.

The loop is what an expert of JAX would write: one jitted function of all state, which
is donated, over a mesh; the compiler puts the collectives.
"""

import itertools
import os
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.cases import Case, loss, optimizer
from benchmarks.programs import Train

# Of one epoch; both programs go round them.
BATCHES = 16


def keras_data_parallel(case: Case, steps_per_execution: int = 1) -> Train:
    """Keras's own fit on all devices, without anything of ours."""
    distribution = keras.distribution.DataParallel()
    return _fit_under(distribution, case, steps_per_execution=steps_per_execution)


def keras_data_parallel_of_8(case: Case) -> Train:
    return keras_data_parallel(case, 8)


def data_parallel_of_workers(case: Case) -> Train:
    """Train in one of several processes, each of which passes its rows to `fit`."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    keras.distribution.initialize(address, ranks, rank)
    distribution = keras.distribution.DataParallel(auto_shard_dataset=False)
    return _fit_under(distribution, case, rank, ranks)


def _fit_under(
    distribution: keras.distribution.DataParallel,
    case: Case,
    rank: int = 0,
    ranks: int = 1,
    steps_per_execution: int = 1,
) -> Train:
    keras.utils.set_random_seed(0)
    with distribution.scope():
        model = case.compiled(steps_per_execution)

    def train(steps: int) -> None:
        x, y = (rows[rank::ranks] for rows in case.rows(steps * case.batch))
        with distribution.scope():
            model.fit(x, y, batch_size=case.batch // ranks, verbose=0)

    return train


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
