"""`fit` of both sides and of Keras alone; nothing here imports `keras_strategy`."""

import os
from collections.abc import Callable, Sequence

import keras

from benchmarks.cases import Case

# Trains for so many steps, and returns when the devices have finished them.
Train = Callable[[int], None]


def fit(
    model: keras.Model,
    case: Case,
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> Train:
    """`model.fit` of one epoch of so many steps."""

    def train(steps: int) -> None:
        x, y = case.rows(steps * case.batch)
        model.fit(x, y, batch_size=case.batch, verbose=0, callbacks=list(callbacks))

    return train


def plain_fit(case: Case, jit_compile: bool | str = "auto") -> Train:
    """Keras as it is, on one device."""
    keras.utils.set_random_seed(0)
    return fit(case.compiled(jit_compile=jit_compile), case)


def plain_compiled_fit(case: Case) -> Train:
    return plain_fit(case, jit_compile=True)


def keras_data_parallel(case: Case, steps_per_execution: int = 1) -> Train:
    """Keras's own fit on all devices, without anything of ours."""
    distribution = keras.distribution.DataParallel()
    return _fit_under(distribution, case, steps_per_execution=steps_per_execution)


def keras_data_parallel_of_8(case: Case) -> Train:
    return keras_data_parallel(case, 8)


def data_parallel_of_workers(case: Case, jit_compile: bool | str = "auto") -> Train:
    """Train in one of several processes, each of which passes its rows to `fit`."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    keras.distribution.initialize(address, ranks, rank)
    distribution = keras.distribution.DataParallel(auto_shard_dataset=False)
    return _fit_under(distribution, case, rank, ranks, jit_compile=jit_compile)


def compiled_data_parallel_of_workers(case: Case) -> Train:
    return data_parallel_of_workers(case, jit_compile=True)


def _fit_under(
    distribution: keras.distribution.DataParallel,
    case: Case,
    rank: int = 0,
    ranks: int = 1,
    steps_per_execution: int = 1,
    jit_compile: bool | str = "auto",
) -> Train:
    keras.utils.set_random_seed(0)
    with distribution.scope():
        model = case.compiled(steps_per_execution, jit_compile)

    def train(steps: int) -> None:
        x, y = (rows[rank::ranks] for rows in case.rows(steps * case.batch))
        with distribution.scope():
            model.fit(x, y, batch_size=case.batch // ranks, verbose=0)

    return train
