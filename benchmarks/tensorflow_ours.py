"""The programs of `benchmarks.tensorflow_peers`, on a strategy of ours."""

import keras_strategy as ks
from benchmarks import tensorflow_peers
from benchmarks.cases import Case
from benchmarks.programs import Train


def steps_of_fit(case: Case) -> Train:
    return tensorflow_peers.steps_of_fit(case, ks.MirroredStrategy())


def steps_of_fit_of_8(case: Case) -> Train:
    return tensorflow_peers.steps_of_fit(case, ks.MirroredStrategy(), 8)


def steps_of_fit_of_local_statistics(case: Case) -> Train:
    strategy = ks.MirroredStrategy(batch_statistics="local")
    return tensorflow_peers.steps_of_fit(case, strategy)


def run_loop(case: Case) -> Train:
    return tensorflow_peers.loop(case, ks.MirroredStrategy(), compiled=False)


def loop_of_a_function(case: Case) -> Train:
    return tensorflow_peers.loop(case, ks.MirroredStrategy(), compiled=True)


def workers_loop(case: Case) -> Train:
    strategy = ks.MultiWorkerMirroredStrategy()
    return tensorflow_peers.loop(case, strategy, compiled=False)
