"""What is counted on torch, in one process or in each of several."""

import dataclasses

import keras_strategy as ks
from benchmarks.cases import CASES
from benchmarks.figures import Figures, figures_of
from benchmarks.programs import fit
from benchmarks.torch_ours import run_loop_of

# A small batch: what is counted does not depend on it.
MLP = dataclasses.replace(CASES[0], batch=4)


def figures(strategy: ks.Strategy, loop: str) -> Figures:
    """The figures of "fit", or of a loop with `strategy.run`."""
    if loop == "run":
        return figures_of(*run_loop_of(strategy, MLP))
    with strategy.scope():
        model = MLP.compiled()
    return figures_of(fit(model, MLP), model)


def figures_of_a_worker(virtual_replicas: int | None = None) -> list[dict]:
    """Those of "fit" and of "run" in one of several processes, as dicts."""
    strategy = ks.MultiWorkerMirroredStrategy(virtual_replicas=virtual_replicas)
    return [dataclasses.asdict(figures(strategy, loop)) for loop in ("fit", "run")]
