"""Peers of the jax backend: Keras's DataParallel, and a loop written by hand.

The loop is what an expert of JAX would write: one jitted function of all state, which
is donated, over a mesh; the compiler puts the collectives.
"""

import itertools
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import keras_strategy as ks
from benchmarks.cases import Case, loss, optimizer
from benchmarks.comparisons import Comparison, fit_in_scope
from benchmarks.pairing import Train

# Of one epoch; both programs go round them.
BATCHES = 16


def keras_data_parallel(case: Case) -> Train:
    """Keras's own fit on all devices, without anything of ours."""
    distribution = keras.distribution.DataParallel()
    keras.utils.set_random_seed(0)
    with distribution.scope():
        model = case.compiled()

    def train(steps: int) -> None:
        x, y = case.rows(steps * case.batch)
        with distribution.scope():
            model.fit(x, y, batch_size=case.batch, verbose=0)

    return train


def batches(case: Case) -> list[tuple[np.ndarray, np.ndarray]]:
    x, y = case.rows(BATCHES * case.batch)
    return [
        (x[begin : begin + case.batch], y[begin : begin + case.batch])
        for begin in range(0, len(x), case.batch)
    ]


def by_hand(case: Case) -> Train:
    """A jitted step over a mesh; it returns its mean loss, which nobody reads."""
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


def mirrored() -> ks.Strategy:
    return ks.MirroredStrategy([f"cpu:{d.id}" for d in jax.devices()])


def run_loop(case: Case, reduces: bool) -> Train:
    """The same loop with `strategy.run`.

    Args:
        case: What is trained.
        reduces: Whether the loss is reduced in every step.
    """
    strategy = mirrored()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model, adam = case.build(), optimizer()
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    per_row = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="none"
    )

    def step(x, y):
        def loss_of_batch():
            logits = model(x, training=True)
            # The mean over all entries of the global batch.
            losses = keras.ops.mean(
                keras.ops.reshape(per_row(y, logits), (len(x), -1)), axis=-1
            )
            return ks.compute_average_loss(losses, case.batch), logits

        variables = model.trainable_variables
        (value, logits), gradients = ks.value_and_grad(
            loss_of_batch, variables, has_aux=True
        )()
        adam.apply(gradients, variables)
        accuracy.update_state(y, logits)
        return value

    dataset = strategy.experimental_distribute_dataset(batches(case))
    elements = iter(())

    def train(steps: int) -> None:
        nonlocal elements
        value = None
        for _ in range(steps):
            element = next(elements, None)
            if element is None:
                elements = iter(dataset)
                element = next(elements)
            value = strategy.run(step, args=element)
            if reduces:
                value = strategy.reduce("SUM", value)
        states = (*model.variables, *adam.variables, *accuracy.variables)
        jax.block_until_ready([v.value for v in states])
        jax.block_until_ready(strategy.experimental_local_results(value))

    return train


# The others need seconds to compile and have the same little beside their arithmetic.
_LARGE = ("MLP, batch 1024", "CNN", "transformer")

COMPARISONS: tuple[Comparison, ...] = (
    Comparison(
        "fit, MirroredStrategy",
        "keras.distribution.DataParallel",
        2,
        1.0,
        lambda case: (fit_in_scope(mirrored(), case), keras_data_parallel(case)),
        without=("MLP, batch 1024", "CNN"),
    ),
    Comparison(
        "run, distributed dataset",
        "jax.jit over a mesh, by hand",
        2,
        0.95,
        lambda case: (run_loop(case, reduces=False), by_hand(case)),
        without=("MLP, batch 1024", "CNN"),
    ),
    Comparison(
        "run and reduce",
        "jax.jit over a mesh, by hand",
        2,
        0.9,
        lambda case: (run_loop(case, reduces=True), by_hand(case)),
        without=_LARGE,
    ),
    Comparison(
        "fit, MirroredStrategy",
        "jax.jit over a mesh, by hand",
        2,
        None,
        lambda case: (fit_in_scope(mirrored(), case), by_hand(case)),
        without=(*_LARGE, "embedding"),
    ),
    Comparison(
        "fit, steps_per_execution=8",
        "jax.jit over a mesh, by hand",
        2,
        0.9,
        lambda case: (fit_in_scope(mirrored(), case, 8), by_hand(case)),
        without=(*_LARGE, "embedding"),
    ),
)
