"""What is counted on torch, in one process or in each of several."""

import dataclasses
from collections.abc import Sequence

import keras_strategy as ks
from benchmarks.cases import CASES
from benchmarks.comparisons import MLP as MLP_NAME
from benchmarks.programs import Fit
from benchmarks.programs.ours import loop_under
from tests.speed.figures import Figures, figures_of

# A small batch: what is counted does not depend on it.
MLP = dataclasses.replace(CASES[MLP_NAME], batch=4)


def figures(strategy: ks.Strategy, loop: str) -> Figures:
    """Return the figures of "fit", "compiled fit" or a loop with `strategy.run`."""
    if loop == "run":
        return figures_of(*loop_under(strategy, MLP))
    with strategy.scope():
        model = MLP.compiled(jit_compile=loop == "compiled fit")
    return figures_of(Fit(model, MLP), model)


def figures_of_a_worker(
    loops: Sequence[str], virtual_replicas: int | None = None
) -> list[dict]:
    """Return the figures of each loop, as dicts, in one of several processes."""
    strategy = ks.MultiWorkerMirroredStrategy(virtual_replicas=virtual_replicas)
    return [dataclasses.asdict(figures(strategy, loop)) for loop in loops]
