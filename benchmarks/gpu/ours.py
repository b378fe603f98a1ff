"""Our programs on GPUs."""

import os

import keras_strategy as ks
from benchmarks.cases import Case
from benchmarks.gpu import engine
from benchmarks.gpu.peers import Fit
from benchmarks.ours import fit_in_scope
from benchmarks.programs import Train


def logical_fit(case: Case) -> Train:
    """On TensorFlow, `fit` over two logical GPUs of one."""
    return fit_in_scope(ks.MirroredStrategy(engine.divide()), case)


def workers_fit(case: Case) -> Train:
    """One of two processes.

    BENCHMARKS_IMPLEMENTATION says how values travel, BENCHMARKS_SHARD what is split.
    """
    engine.exact()
    options = ks.experimental.CommunicationOptions(
        implementation=os.environ["BENCHMARKS_IMPLEMENTATION"]
    )
    strategy = ks.MultiWorkerMirroredStrategy(
        communication_options=options, shard=os.environ.get("BENCHMARKS_SHARD")
    )
    return Fit(case, strategy.scope())
