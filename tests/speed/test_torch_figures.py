"""What a training step on torch costs, in figures that no machine changes."""

import keras
import pytest

import keras_strategy as ks
from keras_strategy.testing import WorkerRunner
from tests.speed.figures import Figures

if keras.backend.backend() != "torch":
    pytest.skip("for the torch backend", allow_module_level=True)

from tests.speed import torch_jobs  # noqa: E402

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
    check(torch_jobs.figures(mirrored(2), loop), THREADS_CALLS)


@pytest.mark.needs_patch("Model.get_metrics_result", backend="torch")
def test_cost_per_step_of_two_processes(starter):
    with WorkerRunner(2, timeout_seconds=300, starter=starter) as runner:
        results = runner.run(torch_jobs.figures_of_a_worker, list(WORKER_CALLS))
    for figures_of_loops in results:
        for calls, figures in zip(WORKER_CALLS.values(), figures_of_loops, strict=True):
            check(Figures(**figures), calls, CHECKSUM_BYTES)


def test_cost_per_step_of_virtual_replicas(starter):
    """A check, an exchange of parts and one of their sums: half of the gradients."""
    with WorkerRunner(2, timeout_seconds=300, starter=starter) as runner:
        loops = ["fit", "run"]
        for found in runner.run(torch_jobs.figures_of_a_worker, loops, 2):
            for figures in found:
                sent = figures["gradient_bytes"] * 3 / 2
                assert figures["collectives"] == 3
                assert 0 < figures["bytes"] - sent <= CHECKSUM_BYTES


def test_one_device_adds_no_cost():
    figures = torch_jobs.figures(ks.OneDeviceStrategy("cpu:0"), "fit")
    assert (figures.collectives, figures.bytes, figures.transfers) == (0, 0, 0)
