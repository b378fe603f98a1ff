"""Workers that are forks; test_launched.py has some that import all of it themselves.

That both train to the same weights, to the last bit, is tested there.
"""

import os

import pytest

from keras_strategy.testing import WorkerRunner
from tests.distributed import jobs


@pytest.mark.full(keep_on="jax")
def test_unseeded_workers_agree_on_a_seed(two_workers):
    first, second = (two_workers.run(jobs.collectives)[0] for _ in range(2))
    assert (first["first"] != second["first"]).all()


def test_unowned_workers_are_not_ended(two_workers):
    assert os.getpid() not in two_workers.run(os.getppid)
    with WorkerRunner(1) as runner:
        assert runner.run(os.getppid) == [os.getpid()]
