"""Worker processes: starting, signalling and watching them."""

import abc
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from keras_strategy.cluster.process_exit import EXIT_OTHER_WORKER_FAILED, EXIT_PREEMPTED

_STARTER = pathlib.Path(__file__).with_name("starter.py")
# A Python program without site packages.
_START = [sys.executable, "-I", "-S", str(_STARTER)]


class Process(abc.ABC):
    """Process in its own group, with a name for messages, however it was started."""

    # The id of the process, and of its group.
    pid: int

    def __init__(self, name: str) -> None:
        self.name = name
        self.seconds: float | None = None
        self._started = time.monotonic()
        self._status: int | None = None

    @abc.abstractmethod
    def _ended(self) -> int | None:
        """Return the exit status once the process has ended and its group is killed."""

    def poll(self) -> int | None:
        """Return the exit status, or minus the signal; None while the process runs."""
        # Processes that it has left in its group are killed.
        if self._status is None:
            self._status = self._ended()
            if self._status is not None:
                self.seconds = time.monotonic() - self._started
        return self._status

    def wait(self) -> int:
        """Wait for the end without a time limit and return the exit status."""
        while (status := self.poll()) is None:
            time.sleep(0.01)
        return status

    def signal(self, number: int) -> None:
        """Send a signal to the process and its children, if it still runs."""
        if self.poll() is None:
            self._signal_group(number)

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def kill(self) -> int:
        """Kill the process and its children and return the exit status."""
        self.signal(signal.SIGKILL)
        return self.wait()


class WorkerProcess(Process):
    """Process that runs a command and dies with the *thread* that started it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        stdin: Any = subprocess.DEVNULL,
        stdout: Any = None,
        stderr: Any = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        super().__init__(name)
        self._popen = subprocess.Popen(
            [*_START, str(os.getpid()), *command],
            env=dict(environment),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            process_group=0,
            pass_fds=descriptors,
        )
        self.pid = self._popen.pid
        # The reading ends of `subprocess.PIPE`.
        self.stdout: Any = self._popen.stdout
        self.stderr: Any = self._popen.stderr

    def _ended(self) -> int | None:
        if hasattr(os, "waitid"):
            # The process stays a zombie, so its id, which is the group's as well,
            # cannot have been reused when the group is killed.
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            has_ended = os.waitid(os.P_PID, self.pid, options) is not None
        else:
            has_ended = self._popen.poll() is not None
        if not has_ended:
            return None
        self._signal_group(signal.SIGKILL)
        return self._popen.wait()


class Guard:
    """Process that kills process groups when this process is killed: see `starter`."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            _START,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def send(self, sign: str, group: int) -> None:
        """Add a group ("+"), or remove one whose id may be reused ("-")."""
        # The guard itself may have been killed.
        with contextlib.suppress(OSError):
            print(f"{sign}{group}", file=self._popen.stdin, flush=True)

    def close(self) -> None:
        """End the guard and the remaining groups."""
        self._popen.communicate()


class ProcessWatch:
    """Watch over processes, which kills those that take too long to end."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self.running = set(range(len(processes)))
        # The rank of the first failure; one that another failure caused counts only if
        # no other did.
        self.failed: int | None = None
        self._processes = processes
        self._kill_at: float | None = None

    def poll(self) -> int | None:
        """Return the status of a new failure: the first, or one that caused it."""
        failure = None
        for rank in sorted(self.running):
            status = self._processes[rank].poll()
            if status is None:
                continue
            self.running.discard(rank)
            if status != 0 and (self.failed is None or self._is_cause(status)):
                self.failed, failure = rank, status
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            for rank in self.running:
                self._processes[rank].kill()
        return failure

    def _is_cause(self, status: int) -> bool:
        """Return True if a process failed by itself, and the first failure did not."""
        if self._processes[self.failed or 0].poll() != EXIT_OTHER_WORKER_FAILED:
            return False
        others = EXIT_OTHER_WORKER_FAILED, -signal.SIGTERM, -signal.SIGKILL
        return self._kill_at is None or status not in others

    def let_end(self, grace_seconds: float) -> None:
        """Give the processes this time to end, counted from the first call."""
        kill_at = time.monotonic() + grace_seconds
        self._kill_at = min(self._kill_at or kill_at, kill_at)


@contextlib.contextmanager
def record_signals() -> Iterator[list[int]]:
    """Context manager of a list that records signals, instead of dying of them."""
    received: list[int] = []
    numbers = [signal.SIGINT, signal.SIGTERM]
    # One that is ignored (by nohup) stays ignored.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    previous = {n: signal.signal(n, lambda n, _: received.append(n)) for n in numbers}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)


def run_python(arguments: Sequence[str], **options: Any) -> tuple[str, int]:
    """Run Python to its end; return its output to both streams, and its exit status."""
    done = subprocess.run(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        **options,
    )
    return done.stdout, done.returncode


def exit_text(status: int | None) -> str:
    """Describe how a process ended, such as `"was killed by SIGKILL"`."""
    if status is None:
        return "still runs"
    if status == EXIT_PREEMPTED:
        return f"was preempted (exit status {status})"
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}"
