"""A worker that fails ends the others, which say who it was."""

import keras
import pytest

from keras_strategy.testing import WorkerRunner
from tests.workers import jobs

# A dead worker is to be noticed within this time, a silent one after the timeout.
NOTICED_SECONDS = 30
TIMEOUT_SECONDS = 8

FAULTS = [
    ("killed", 1, "worker 1 is gone without a word"),
    ("killed", 0, "worker 0 is gone without a word"),
    ("raises", 1, "worker 1 raised ValueError: the disk is full"),
    ("raises", 0, "worker 0 raised ValueError: the disk is full"),
    ("hangs", 1, "worker 1"),
    ("leaves", 1, "worker 1 ended while worker 0 was waiting for it in"),
    ("does not arrive", 1, "worker 1 has not arrived within 8 s"),
]


@pytest.mark.parametrize(
    ("fault", "rank", "said"),
    FAULTS,
    ids=[f"{fault}_{rank}".replace(" ", "_") for fault, rank, _ in FAULTS],
)
def test_a_fault_ends_all_workers(fault, rank, said, starter):
    # Where a machine is slow, the others need longer than that to start or compile.
    silent = fault in ("hangs", "does not arrive")
    timeout = {"KERAS_STRATEGY_TIMEOUT_SECONDS": str(TIMEOUT_SECONDS)}
    environment = timeout if silent else None
    with WorkerRunner(
        2, timeout_seconds=110, environment=environment, starter=starter
    ) as runner:
        runner.start(jobs.train_until, fault, rank)
        ends = runner.wait() if fault != "does not arrive" else _wait_for(runner, 0)
    other = ends[1 - rank]
    assert other.exit_status != 0
    if keras.backend.backend() == "jax" and (fault, rank) == ("killed", 0):
        # JAX ends a process whose coordinator is gone, and may come first.
        jax_said = "Terminating process because the JAX distributed service"
        assert said in other.output or jax_said in other.output
    else:
        assert said in other.output
    if fault in ("killed", "raises"):
        assert other.seconds - ends[rank].seconds < NOTICED_SECONDS
    if fault == "hangs":
        assert f"within {TIMEOUT_SECONDS} s" in other.output
        assert "time.sleep(120)" in other.output


def _wait_for(runner, rank):
    """Waits for one worker, and ends the others."""
    runner.processes[rank].wait()
    for process in runner.processes:
        process.kill()
    return runner.wait()
