"""`fit` of Keras alone, on one device and with its own distributions."""

import os

import keras

from benchmarks.cases import Case
from benchmarks.programs import Fit


def fit(case: Case, jit_compile: bool | str = "auto", exact: bool = False) -> Fit:
    """Train on one device; if `exact`, so that the weights can be compared."""
    if exact:
        from benchmarks.gpu import engine

        engine.set_exact()
    keras.utils.set_random_seed(0)
    return Fit(case.compiled(jit_compile=jit_compile), case, shuffle=not exact)


def data_parallel_fit(case: Case, steps_per_execution: int = 1) -> Fit:
    distribution = keras.distribution.DataParallel()
    keras.utils.set_random_seed(0)
    with distribution.scope():
        model = case.compiled(steps_per_execution)
    return Fit(model, case, scope=distribution.scope)


def data_parallel_fit_of_workers(case: Case, jit_compile: bool | str = "auto") -> Fit:
    """Train in one of several processes, each of which passes its rows to `fit`."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    keras.distribution.initialize(address, ranks, rank)
    distribution = keras.distribution.DataParallel(auto_shard_dataset=False)
    keras.utils.set_random_seed(0)
    with distribution.scope():
        model = case.compiled(jit_compile=jit_compile)
    return Fit(model, case, rank, ranks, distribution.scope)
