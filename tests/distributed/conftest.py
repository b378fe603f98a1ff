"""Real worker processes on this machine."""

import pytest

from keras_strategy.testing import WorkerRunner
from tests.distributed import jobs


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


@pytest.fixture(scope="module")
def in_turns(starter):
    """Calls functions in 2 workers that start once: `jobs.in_turns`.

    It gives what each worker returned, by the name of the call, and what each printed.
    """

    def run(**calls):
        with WorkerRunner(2, timeout_seconds=300, starter=starter) as runner:
            found = runner.run(jobs.in_turns, calls)
            printed = [runner.output(rank) for rank in (0, 1)]
        return {name: [of[name] for of in found] for name in calls}, printed

    return run
