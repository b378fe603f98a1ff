"""Workers train on one process's batches, of all kinds of data, or raise an error."""

import itertools

import numpy as np
import pytest

from keras_strategy.testing import WorkerRunner
from tests.distributed import input_matrix_jobs as jobs

LIBRARIES = {"loader": "torch", "stream": "torch", "tf.data": "tensorflow"}


@pytest.mark.full(keep=3)
@pytest.mark.parametrize("source", jobs.SOURCES)
def test_input_equals_one_process(starter, source):
    library = LIBRARIES.get(source.split()[0], source)
    if library in ("torch", "tensorflow", "grain"):
        pytest.importorskip(library)

    def fit(count, alone):
        # Not in this process: a loader's forks would keep the starter's socket open.
        with WorkerRunner(count, timeout_seconds=300, starter=starter) as runner:
            return runner.run(jobs.fit_cells, source, alone)

    (expected,), wrong = fit(1, alone=True), {}
    for count in (2, 1):
        for cell, result in itertools.product(expected, fit(count, alone=False)):
            if isinstance(result[cell], str):
                wrong[count, cell] = result[cell]
                continue
            difference = max(
                float(np.abs(got - want).max())
                for got, want in zip(result[cell], expected[cell], strict=True)
            )
            if difference > 2e-5:
                wrong[count, cell] = difference
    assert not wrong
