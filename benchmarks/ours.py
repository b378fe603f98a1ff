"""Our programs that are the same on every backend."""

from collections.abc import Sequence

import keras

import keras_strategy as ks
from benchmarks.cases import Case
from benchmarks.programs import Train, fit


def fit_in_scope(
    strategy: ks.Strategy,
    case: Case,
    steps_per_execution: int = 1,
    jit_compile: bool | str = "auto",
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> Train:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        return fit(case.compiled(steps_per_execution, jit_compile), case, callbacks)


def one_device_fit(case: Case) -> Train:
    return fit_in_scope(ks.OneDeviceStrategy(_device()), case)


def one_replica_fit(case: Case) -> Train:
    return fit_in_scope(ks.MirroredStrategy([_device()]), case)


def mirrored_fit(case: Case) -> Train:
    return fit_in_scope(ks.MirroredStrategy(), case)


def fit_of_local_statistics(case: Case) -> Train:
    return fit_in_scope(ks.MirroredStrategy(batch_statistics="local"), case)


def mirrored_fit_drawing_own(case: Case) -> Train:
    """Each replica draws random numbers of its own, not one device's."""
    ks.config.exact_random(False)
    return mirrored_fit(case)


def mirrored_fit_of_8(case: Case) -> Train:
    """`fit` with `steps_per_execution=8`."""
    return fit_in_scope(ks.MirroredStrategy(), case, 8)


def workers_fit(case: Case) -> Train:
    return fit_in_scope(ks.MultiWorkerMirroredStrategy(), case)


def workers_fit_of_local_statistics(case: Case) -> Train:
    strategy = ks.MultiWorkerMirroredStrategy(batch_statistics="local")
    return fit_in_scope(strategy, case)


def workers_fit_drawing_own(case: Case) -> Train:
    """Train as `mirrored_fit_drawing_own` does."""
    ks.config.exact_random(False)
    return workers_fit(case)


def _device() -> str:
    return ks.MirroredStrategy().extended.worker_devices[0]
