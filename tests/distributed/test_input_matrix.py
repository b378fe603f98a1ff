"""Workers train on one process's batches, of all kinds of data, or raise an error."""

import numpy as np
import pytest

from keras_strategy.testing import WorkerRunner
from tests.distributed import input_matrix_jobs as jobs

LIBRARIES = {"loader": "torch", "stream": "torch", "tf.data": "tensorflow"}


@pytest.mark.parametrize("source", jobs.SOURCES)
@pytest.mark.parametrize("count", [2, 1])
def test_input_equals_one_process(starter, source, count):
    library = LIBRARIES.get(source.split()[0], source)
    if library in ("torch", "tensorflow", "grain"):
        pytest.importorskip(library)
    expected = jobs.fit_cells(source, alone=True)
    with WorkerRunner(count, timeout_seconds=300, starter=starter) as runner:
        results = runner.run(jobs.fit_cells, source)
    wrong = {}
    for cell, weights in expected.items():
        for result in results:
            if isinstance(result[cell], str):
                wrong[cell] = result[cell]
                continue
            difference = max(
                float(np.abs(got - want).max())
                for got, want in zip(result[cell], weights, strict=True)
            )
            if difference > 2e-5:
                wrong[cell] = difference
    assert not wrong
