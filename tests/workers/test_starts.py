"""Workers that are forks, and workers that import all of it themselves."""

import os

import numpy as np

from keras_strategy.testing import WorkerRunner
from tests.workers import jobs


def test_forked_workers_do_what_fresh_ones_do(two_workers):
    with WorkerRunner(2, timeout_seconds=300) as runner:
        cold = runner.run(jobs.collectives)
        assert set(runner.run(os.getppid)) == {os.getpid()}
    warm = two_workers.run(jobs.collectives)
    assert os.getpid() not in two_workers.run(os.getppid)
    for one, other in zip(cold, warm, strict=True):
        for name in ("replicas", "sum", "mean", "gathered", "total"):
            np.testing.assert_array_equal(one[name], other[name])
        # Random numbers, and not those of the workers before.
        assert (one["first"] != other["first"]).all()
    assert (two_workers.run(jobs.collectives)[0]["first"] != warm[0]["first"]).all()
