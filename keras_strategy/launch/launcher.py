"""Runs a program in several workers, and again when they fail or are preempted."""

import dataclasses
import os
import signal
import sys
import time

from keras_strategy.launch.environment import LocalCluster
from keras_strategy.launch.processes import exit_text
from keras_strategy.launch.signals import ReceivedSignals
from keras_strategy.launch.team import Failure, WorkerTeam

_FIRST_WAIT_SECONDS = 1.0
_LONGEST_WAIT_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Launcher:
    """Runs a command in several workers of this machine.

    Attributes:
        command: The program and its arguments.
        workers: How many workers run it.
        devices_per_worker: The logical CPU devices of each; None leaves them alone.
        max_restarts: How often all workers are started again when one failed or was
            preempted.
        grace_seconds: How long a worker may take to end when it is told to.

    Example:

    ```python
    import sys

    from keras_strategy.launch.launcher import Launcher

    status = Launcher((sys.executable, "-c", "exit(3)"), workers=1).run()
    assert status == 3
    ```
    """

    command: tuple[str, ...]
    workers: int
    devices_per_worker: int | None = None
    max_restarts: int = 0
    grace_seconds: float = 30.0

    def run(self) -> int:
        """Runs the command to its end; call it in the main thread.

        Returns:
            0, or the exit code of the worker that failed first, which is 128 and the
            signal if one killed it; 130 after SIGINT.
        """
        with ReceivedSignals() as signals:
            restarts = failures = 0
            while True:
                failure = WorkerTeam(
                    LocalCluster.on_free_ports(
                        self.workers, devices_per_worker=self.devices_per_worker
                    ),
                    self.command,
                    dict(os.environ),
                    self.grace_seconds,
                    signals,
                ).run()
                if failure is None:
                    return 0
                what = f"{failure.name} {exit_text(failure.status)}."
                if signals.all or restarts == self.max_restarts:
                    break
                # Who was preempted has done its part, and need not wait for longer.
                failures = 0 if failure.preempted else failures + 1
                seconds = _FIRST_WAIT_SECONDS * 2 ** max(0, failures - 1)
                seconds = min(seconds, _LONGEST_WAIT_SECONDS)
                restarts += 1
                _say(
                    f"{what} All workers start again in {seconds:.0f} s "
                    f"(restart {restarts} of {self.max_restarts})."
                )
                if not _wait(seconds, signals):
                    break
            if signals.all or failure.preempted:
                _say(what)
            else:
                _explain(what, failure)
            # Workers may end of it in ways of their own.
            interrupted = signal.SIGINT in signals.all
            return 128 + signal.SIGINT if interrupted else failure.exit_code


def _wait(seconds: float, signals: ReceivedSignals) -> bool:
    """Waits; false if a signal came meanwhile."""
    until = time.monotonic() + seconds
    while not signals.all and time.monotonic() < until:
        time.sleep(0.05)
    return not signals.all


def _explain(what: str, failure: Failure) -> None:
    if not failure.last_lines:
        _say(f"{what} It wrote nothing.")
        return
    _say(f"{what} Its last output:")
    sys.stderr.buffer.write(b"".join(line + b"\n" for line in failure.last_lines))
    sys.stderr.buffer.flush()


def _say(text: str) -> None:
    sys.stdout.flush()
    print(f"keras-strategy: {text}", file=sys.stderr, flush=True)
