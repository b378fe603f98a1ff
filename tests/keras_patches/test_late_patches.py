"""Hooks that several replicas need come when others have been at work for long."""

import pytest

from keras_strategy.testing import WorkerRunner
from tests.distributed.test_training import equal
from tests.keras_patches import late_jobs


@pytest.mark.full(keep_on="jax")
def test_patches_are_installed_for_several_replicas(starter):
    with WorkerRunner(1, 2, timeout_seconds=300, starter=starter) as runner:
        ((one, early, late),) = runner.run(late_jobs.one_and_then_two)
    assert equal(one, late)
    assert equal(one, early)
