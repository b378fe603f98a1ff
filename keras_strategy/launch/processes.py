"""Worker processes: starting, signalling and watching them."""

import abc
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from keras_strategy.cluster.process_exit import EXIT_OTHER_WORKER_FAILED, EXIT_PREEMPTED

_FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STARTER = pathlib.Path(__file__).with_name("starter.py")
# A Python program without site packages.
_START = [sys.executable, "-I", "-S", str(_STARTER)]


class Process(abc.ABC):
    """Process in its own group, with a name for messages, however it was started."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seconds: float | None = None
        self._started = time.monotonic()
        self._status: int | None = None

    @property
    @abc.abstractmethod
    def pid(self) -> int:
        """The id of the process, and of its group."""

    @abc.abstractmethod
    def _ended(self) -> int | None:
        """Return the exit status once the process has ended and its group is killed."""

    @abc.abstractmethod
    def _signal_group(self, number: int) -> None:
        """Send a signal to the group of a process that was not seen to end."""

    def poll(self) -> int | None:
        """Return the exit status, or minus the signal; None while the process runs."""
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

    def kill(self) -> int:
        """Kill the process and its children and return the exit status."""
        self.signal(signal.SIGKILL)
        return self.wait()


class WorkerProcess(Process):
    """Process that runs a command and dies with the process that started it."""

    # On Linux the kernel kills it when the *thread* that started it ends: start workers
    # from a thread that outlives them, such as the main one.
    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        stdin: Any = subprocess.DEVNULL,
        stdout: Any = None,
        stderr: Any = None,
    ) -> None:
        super().__init__(name)
        self._popen = subprocess.Popen(
            [*_START, str(os.getpid()), *command],
            env=dict(environment),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            process_group=0,
        )

    @property
    def pid(self) -> int:
        """The id of the process, and of its group."""
        return self._popen.pid

    @property
    def stdout(self) -> Any:
        """The reading end, if `stdout` was `subprocess.PIPE`."""
        return self._popen.stdout

    @property
    def stderr(self) -> Any:
        """The reading end, if `stderr` was `subprocess.PIPE`."""
        return self._popen.stderr

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

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


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
        assert self._popen.stdin is not None
        self._stdin = self._popen.stdin

    def add(self, group: int) -> None:
        """Have the guard kill a group."""
        self._send(f"+{group}")

    def remove(self, group: int) -> None:
        """Have the guard spare a group, whose id may be reused."""
        self._send(f"-{group}")

    def close(self) -> None:
        """End the guard and the remaining groups."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        self._popen.wait()

    def _send(self, line: str) -> None:
        # The guard itself may have been killed.
        with contextlib.suppress(OSError):
            print(line, file=self._stdin, flush=True)


class ProcessWatch:
    """Watch over processes, which kills those that take too long to end."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self.running: set[int] = set()
        # The rank of the first failure; one that another failure caused counts only if
        # no other did.
        self.failed: int | None = None
        self._processes = processes
        self._kill_at: float | None = None

    def until_all_ended(
        self, meanwhile: Callable[[], None], on_failure: Callable[[int], None]
    ) -> None:
        """Call `meanwhile`, which waits, until all processes have ended."""
        self.running = set(range(len(self._processes)))
        while self.running:
            meanwhile()
            for rank in sorted(self.running):
                status = self._processes[rank].poll()
                if status is None:
                    continue
                self.running.discard(rank)
                # The process that caused the first failure may end after it.
                if status != 0 and (self.failed is None or self._is_cause(status)):
                    self.failed = rank
                    on_failure(status)
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                for rank in self.running:
                    self._processes[rank].kill()

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


class ReceivedSignals:
    """Context manager of the main thread that records signals, and survives them."""

    def __init__(self) -> None:
        self.all: list[int] = []
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "ReceivedSignals":
        for number in _FORWARDED_SIGNALS:
            # Ignored by nohup.
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler or signal.SIG_DFL)  # pyright: ignore

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.all.append(number)


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
