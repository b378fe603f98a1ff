"""What workers write, line by line, with their names in front.

All workers of one attempt: they start together and end together.

Runs a program in several workers, and again when they fail or are preempted.
"""

import collections
import dataclasses
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import BinaryIO

from keras_strategy.cluster.process_exit import EXIT_OTHER_WORKER_FAILED, EXIT_PREEMPTED
from keras_strategy.launch.local_cluster import LocalCluster, thread_limits
from keras_strategy.launch.processes import (
    Guard,
    ProcessWatch,
    ReceivedSignals,
    WorkerProcess,
    exit_text,
)

# A progress bar ends its lines with a carriage return alone. One at the very end may be
# the first half of "\r\n".
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")
_LONGEST = 1 << 20
_KEPT = 200
_WITHOUT_TRACEBACK = 20
_COLOURS = (36, 33, 35, 32, 34, 31)


class LastLines:
    """The last lines that a worker wrote, to either of its streams."""

    def __init__(self) -> None:
        self._lines: collections.deque[bytes] = collections.deque(maxlen=_KEPT)

    def add(self, line: bytes) -> None:
        """Remembers a line."""
        self._lines.append(line)

    def reason(self) -> list[bytes]:
        """The lines from the first traceback on, or else the last few."""
        lines = list(self._lines)
        for number, line in enumerate(lines):
            if line.startswith(b"Traceback (most recent call last)"):
                return lines[number:]
        return lines[-_WITHOUT_TRACEBACK:]


class PrefixedStream:
    """Passes on one stream of a worker.

    Args:
        source: The file descriptor to read from.
        target: Where whole lines go.
        name: What stands in front of each line.
        number: The worker's rank, which picks a colour.
        last_lines: Is told every line, too.
    """

    def __init__(
        self,
        source: int,
        target: BinaryIO,
        name: str,
        number: int,
        last_lines: LastLines,
    ) -> None:
        self.source = source
        self._target = target
        self._prefix = f"{name} | ".encode()
        if target.isatty() and not os.environ.get("NO_COLOR"):
            colour = _COLOURS[number % len(_COLOURS)]
            self._prefix = b"\x1b[%dm%s\x1b[0m" % (colour, self._prefix)
        self._last_lines = last_lines
        self._rest = b""

    def read(self) -> bool:
        """Passes on what is there; false when the stream has ended."""
        data = os.read(self.source, 1 << 16)
        if not data:
            self.finish()
            return False
        *lines, self._rest = _LINE_END.split(self._rest + data)
        if len(self._rest) > _LONGEST:
            lines.append(self._rest)
            self._rest = b""
        self._write(lines)
        return True

    def finish(self) -> None:
        """Passes on a last line that has no end."""
        if self._rest:
            self._write([self._rest.removesuffix(b"\r")])
            self._rest = b""

    def _write(self, lines: list[bytes]) -> None:
        for line in lines:
            self._last_lines.add(line)
        # In one piece, so that lines of different workers do not mix.
        self._target.write(b"".join(self._prefix + line + b"\n" for line in lines))
        self._target.flush()


# A signal waits this long at most to be forwarded; ends are noticed at once, since
# they close a pipe.
_WAKE_SECONDS = 0.1
# How long a worker may take to end by itself of what another one has ended of, or when
# all of them are preempted.
_CAUSE_SECONDS = 2.0
# For output that a process outside the worker's group holds open.
_DRAIN_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class Failure:
    """How the worker that failed first ended.

    Attributes:
        name: Its task, such as `"worker 1"`.
        status: Its exit status, or minus the signal that killed it.
        last_lines: What it wrote last.
    """

    name: str
    status: int
    last_lines: list[bytes]

    @property
    def preempted(self) -> bool:
        """Whether it was asked to end, and saved what it had done."""
        return self.status == EXIT_PREEMPTED

    @property
    def exit_code(self) -> int:
        """The status as a shell has it: 128 and the signal."""
        return self.status if self.status > 0 else 128 - self.status


class WorkerTeam:
    """Starts the workers of a cluster and watches them until all have ended.

    Args:
        cluster: Where they listen.
        command: What each of them runs.
        environment: What they inherit.
        grace_seconds: How long they may take to end when they are told to.
        signals: What is forwarded to them.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        command: Sequence[str],
        environment: dict[str, str],
        grace_seconds: float,
        signals: ReceivedSignals,
    ) -> None:
        self._cluster = cluster
        self._command = command
        self._environment = environment
        self._grace_seconds = grace_seconds
        self._signals = signals
        self._workers: list[WorkerProcess] = []
        self._last_lines: list[LastLines] = []
        self._selector = selectors.DefaultSelector()
        self._forwarded = 0
        self._guard = Guard()
        self._end_at: float | None = None
        self._watch = ProcessWatch(self._workers)

    def run(self) -> Failure | None:
        """Runs the workers to their end; returns how the first failed, if one did."""
        try:
            for rank in range(len(self._cluster.ports)):
                self._start(rank)
            self._watch.until_all_ended(self._meanwhile, self._when_one_failed)
            self._drain()
        finally:
            for worker in self._workers:
                worker.signal(signal.SIGKILL)
            for worker in self._workers:
                worker.wait()
                self._guard.remove(worker.pid)
                worker.stdout.close()
                worker.stderr.close()
            self._guard.close()
            self._selector.close()
        failed = self._watch.failed
        if failed is None:
            return None
        worker = self._workers[failed]
        # Its traceback may have come after its end was noticed.
        return Failure(worker.name, worker.wait(), self._last_lines[failed].reason())

    def _start(self, rank: int) -> None:
        name = self._cluster.name(rank)
        worker = WorkerProcess(
            name,
            self._command,
            {
                **thread_limits(len(self._cluster.ports)),
                **self._environment,
                **self._cluster.variables(rank),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._guard.add(worker.pid)
        self._workers.append(worker)
        last_lines = LastLines()
        self._last_lines.append(last_lines)
        for source, target in (
            (worker.stdout, sys.stdout),
            (worker.stderr, sys.stderr),
        ):
            stream = PrefixedStream(
                source.fileno(), target.buffer, name, rank, last_lines
            )
            self._selector.register(stream.source, selectors.EVENT_READ, stream)

    def _when_one_failed(self, status: int) -> None:
        if status in (EXIT_OTHER_WORKER_FAILED, EXIT_PREEMPTED):
            # The one that it failed of is about to say why; who is preempted ends with
            # all others.
            self._end_at = time.monotonic() + _CAUSE_SECONDS
        else:
            self._end_at = None
            self._end_workers(signal.SIGTERM)

    def _meanwhile(self) -> None:
        self._pass_on_output(_WAKE_SECONDS)
        if self._end_at is not None and time.monotonic() > self._end_at:
            self._end_at = None
            self._end_workers(signal.SIGTERM)
        for number in self._signals.all[self._forwarded :]:
            # Who asks twice does not want to wait.
            self._end_workers(number if not self._forwarded else signal.SIGKILL)
            self._forwarded += 1

    def _end_workers(self, number: int) -> None:
        for worker in self._workers:
            worker.signal(number)
        self._watch.let_end(self._grace_seconds)

    def _pass_on_output(self, seconds: float) -> None:
        if not self._selector.get_map():
            # They closed their output and still run.
            time.sleep(seconds)
            return
        for key, _ in self._selector.select(seconds):
            if not key.data.read():
                self._selector.unregister(key.fileobj)

    def _drain(self) -> None:
        until = time.monotonic() + _DRAIN_SECONDS
        while self._selector.get_map() and time.monotonic() < until:
            self._pass_on_output(_WAKE_SECONDS)
        for key in self._selector.get_map().values():
            key.data.finish()


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
