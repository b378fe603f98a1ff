"""Rows that workers read and send in a step, and their messages."""

import keras
import pytest

from keras_strategy.testing import WorkerRunner
from tests.speed import input_figures

pytestmark = pytest.mark.full

BACKEND = keras.backend.backend()
WORKERS = 2


@pytest.fixture(scope="module")
def results(starter):
    with WorkerRunner(WORKERS, timeout_seconds=300, starter=starter) as runner:
        return runner.run(input_figures.figures_of_inputs)


@pytest.mark.parametrize("kind", input_figures.KINDS)
def test_input_cost_per_step(results, kind):
    for of_worker in results:
        figures = of_worker[kind]
        # A PyDataset gives batches, not rows; and what it gives may depend on what the
        # training has done until then.
        whole = kind == "PyDataset"
        assert figures["rows_read"] == input_figures.BATCH / (1 if whole else WORKERS)
        assert figures["row_bytes"] == 0
        assert figures["rounds"] == whole
        assert figures["collectives"] == of_worker["arrays"]["collectives"] > 0
