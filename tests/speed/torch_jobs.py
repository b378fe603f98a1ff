"""What is counted on torch, in one process or in each of several."""

import dataclasses
from collections.abc import Sequence

import keras_strategy as ks
from benchmarks.cases import CASES
from benchmarks.figures import Figures, figures_of
from benchmarks.programs import fit
from benchmarks.torch_ours import run_loop_of

# A small batch: what is counted does not depend on it.
MLP = dataclasses.replace(CASES[0], batch=4)


def figures(strategy: ks.Strategy, loop: str) -> Figures:
    """Return the figures of "fit", "compiled fit" or a loop with `strategy.run`."""
    if loop == "run":
        return figures_of(*run_loop_of(strategy, MLP))
    with strategy.scope():
        model = MLP.compiled(jit_compile=loop == "compiled fit")
    return figures_of(fit(model, MLP), model)


def figures_of_a_worker(
    loops: Sequence[str], virtual_replicas: int | None = None
) -> list[dict]:
    """Return the figures of each loop, as dicts, in one of several processes."""
    strategy = ks.MultiWorkerMirroredStrategy(virtual_replicas=virtual_replicas)
    return [dataclasses.asdict(figures(strategy, loop)) for loop in loops]
