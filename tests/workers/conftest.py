"""Real worker processes on this machine."""

import pytest

from keras_strategy.testing import WorkerRunner


@pytest.fixture(params=[(3, 1), (2, 2)], ids=["3x1", "2x2"])
def workers(request, starter):
    """Runs a function in 3 workers, and in 2 with 2 devices each."""
    count, devices = request.param
    with WorkerRunner(count, devices, timeout_seconds=300, starter=starter) as runner:
        yield runner


@pytest.fixture
def two_workers(starter):
    """Runs a function in 2 workers."""
    with WorkerRunner(2, timeout_seconds=300, starter=starter) as runner:
        yield runner
