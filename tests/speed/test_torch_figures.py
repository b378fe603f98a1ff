"""Costs of a training step on torch, in figures that no machine changes."""

import dataclasses
from collections.abc import Sequence

import keras
import pytest

import keras_strategy as ks
from benchmarks.cases import CASES
from benchmarks.comparisons import MLP as MLP_NAME
from benchmarks.programs import Fit
from benchmarks.programs.ours import loop_under
from keras_strategy.testing import WorkerRunner
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


if keras.backend.backend() != "torch":
    pytest.skip("for the torch backend", allow_module_level=True)


pytestmark = pytest.mark.full

# Of the digest that travels behind the gradients: its bytes and their squares.
CHECKSUM_BYTES = 2 * 7 * 4


# Functions of ours that a step enters: 329, 352 and 273; in turns 864 to 1003. Three
# hooks ask each optimizer whether the replicas share what it keeps: two functions each.
# One asks of a variable without an aggregation whether one device keeps it for all.
# A gather is started and finished by a function each.
WORKER_CALLS = {"fit": 335, "run": 358, "compiled fit": 279}
THREADS_CALLS = 1030


def check(figures, python_calls, digest=0):
    assert figures.collectives == 1  # the gradients, in one piece
    assert figures.bytes == figures.gradient_bytes + digest
    assert figures.compilations == 0
    assert figures.transfers == 0
    assert 0 < figures.python_calls <= python_calls


@pytest.mark.parametrize("loop", ["fit", "run"])
def test_cost_per_step_of_two_replicas(loop, mirrored):
    check(figures(mirrored(2), loop), THREADS_CALLS)


@pytest.mark.needs_patch("Model.get_metrics_result", backend="torch")
def test_cost_per_step_of_two_processes(starter):
    with WorkerRunner(2, timeout_seconds=300, starter=starter) as runner:
        results = runner.run(figures_of_a_worker, list(WORKER_CALLS))
    for figures_of_loops in results:
        for calls, figures in zip(WORKER_CALLS.values(), figures_of_loops, strict=True):
            check(Figures(**figures), calls, CHECKSUM_BYTES)


def test_cost_per_step_of_virtual_replicas(starter):
    """A check, an exchange of parts and one of their sums: half of the gradients."""
    with WorkerRunner(2, timeout_seconds=300, starter=starter) as runner:
        loops = ["fit", "run"]
        for found in runner.run(figures_of_a_worker, loops, 2):
            for figures in found:
                sent = figures["gradient_bytes"] * 3 / 2
                assert figures["collectives"] == 3
                assert 0 < figures["bytes"] - sent <= CHECKSUM_BYTES


def test_one_device_adds_no_cost():
    found = figures(ks.OneDeviceStrategy("cpu:0"), "fit")
    assert (found.collectives, found.bytes, found.transfers) == (0, 0, 0)
