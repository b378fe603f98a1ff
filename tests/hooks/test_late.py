"""Hooks that several replicas need come when others have been at work for long."""

from keras_strategy.testing import WorkerRunner
from tests.hooks import late_jobs
from tests.workers.test_training import equal


def test_several_replicas_after_one(starter):
    with WorkerRunner(1, 2, timeout_seconds=300, starter=starter) as runner:
        ((one, early, late),) = runner.run(late_jobs.one_and_then_two)
    assert equal(one, late)
    assert equal(one, early)
