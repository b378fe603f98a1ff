"""Launcher of a program in several local workers, with restarts."""

import collections
import dataclasses
import json
import math
import os
import pathlib
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import BinaryIO

from keras_strategy.cluster.process_exit import EXIT_OTHER_WORKER_FAILED, EXIT_PREEMPTED
from keras_strategy.commands.local_cluster import (
    LocalCluster,
    gpu_variables,
    thread_limits,
)
from keras_strategy.commands.processes import (
    Guard,
    ProcessWatch,
    WorkerProcess,
    exit_text,
    record_signals,
)

FIRST_WAIT_SECONDS = 1.0
_LONGEST_WAIT_SECONDS = 60.0

# A signal is forwarded after this time at most; the end of a process is noticed at
# once, since it closes a pipe.
_WAKE_SECONDS = 0.1
# How long a worker may take to end by itself of another's failure, or when all workers
# are preempted.
CAUSE_SECONDS = 2.0
# For output that a process outside the worker's group holds open.
_DRAIN_SECONDS = 1.0

# A progress bar ends its lines with a carriage return alone. One at the very end may be
# the first half of "\r\n".
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")
_MAX_LINE_BYTES = 1 << 20
_MAX_LAST_LINES = 200
_LAST_LINES_WITHOUT_TRACEBACK = 20
_COLOURS = (36, 33, 35, 32, 34, 31)


@dataclasses.dataclass(frozen=True)
class Launcher:
    """Launcher of a command in several workers, with the options of `run`."""

    command: tuple[str, ...]
    workers: int
    devices_per_worker: int | None = None
    max_restarts: int = 0
    grace_seconds: float = 30.0
    fingerprint: str | None = None
    gpus_per_worker: int | None = None

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of all workers."""
        if self.fingerprint is None:
            return {}
        return {"KERAS_STRATEGY_FINGERPRINT": os.path.abspath(self.fingerprint)}

    @property
    def team_restarts(self) -> int:
        """The number of restarts of all workers together."""
        return self.max_restarts

    def create_team(self, signals: list[int]) -> "WorkerTeam":
        return WorkerTeam(self, signals)

    def run(self) -> int:
        """Run the command to its end in the main thread; return its exit code."""
        # That is 0, or the code of the worker that failed first; 130 after SIGINT.
        if self.fingerprint is not None:
            pathlib.Path(self.fingerprint).unlink(missing_ok=True)
        with record_signals() as signals:
            restarts = failures = 0
            while True:
                failure = self.create_team(signals).run()
                if failure is None:
                    return self._report_fingerprint()
                worker, last_lines = failure
                status = worker.wait()
                reason = f"{worker.name} {exit_text(status)}."
                preempted = status == EXIT_PREEMPTED
                if signals or restarts == self.team_restarts:
                    break
                # A preempted worker has done its part: it need not wait any longer.
                failures = 0 if preempted else failures + 1
                seconds = restart_seconds(failures)
                restarts += 1
                print_line(
                    f"{reason} All workers start again in {seconds:.0f} s "
                    f"(restart {restarts} of {self.team_restarts})."
                )
                until = time.monotonic() + seconds
                while not signals and time.monotonic() < until:
                    time.sleep(0.05)
                if signals:
                    break
            if signals or preempted:
                print_line(reason)
            elif not last_lines:
                print_line(f"{reason} It wrote nothing.")
            else:
                print_line(f"{reason} Its last output:", last_lines)
            # After SIGINT, workers may end in different ways.
            if signal.SIGINT in signals:
                return 128 + signal.SIGINT
            return status if status > 0 else 128 - status

    def _report_fingerprint(self) -> int:
        """Print the fingerprint that the workers have written; return the exit code."""
        if self.fingerprint is None:
            return 0
        file = pathlib.Path(self.fingerprint)
        if not file.exists():
            print_line(
                f"There is no fingerprint for {file}, as the program calls no `fit`."
            )
            return 1
        sha256 = json.loads(file.read_text(encoding="utf-8"))["sha256"]
        print_line(f"The trained model has the fingerprint {sha256}, see {file}.")
        return 0


def print_line(text: str, lines: Sequence[bytes] = ()) -> None:
    sys.stdout.flush()
    print(f"keras-strategy: {text}", file=sys.stderr, flush=True)
    sys.stderr.buffer.write(b"".join(line + b"\n" for line in lines))
    sys.stderr.buffer.flush()


def restart_seconds(failures: int) -> float:
    """Return how long to wait before a restart, after so many failures in a row."""
    seconds = FIRST_WAIT_SECONDS * 2 ** max(0, failures - 1)
    return min(seconds, _LONGEST_WAIT_SECONDS)


class WorkerTeam:
    """Workers of one attempt, which start together and end together."""

    def __init__(self, launcher: Launcher, signals: list[int]) -> None:
        self._launcher, self._signals = launcher, signals
        self._workers: list[WorkerProcess] = []
        # The last lines that each worker wrote, to either of its streams.
        self._last_lines: list[collections.deque[bytes]] = []
        self._selector = selectors.DefaultSelector()
        self._num_forwarded = 0
        self._guard = Guard()

    def run(self) -> tuple[WorkerProcess, list[bytes]] | None:
        """Run the workers to their end; return the first that failed, and its lines."""
        try:
            failed = self._supervise()
            until = time.monotonic() + _DRAIN_SECONDS
            while self._selector.get_map() and time.monotonic() < until:
                self._forward_output()
            for key in self._selector.get_map().values():
                key.data.finish()
        finally:
            for worker in self._workers:
                worker.signal(signal.SIGKILL)
            for worker in self._workers:
                worker.wait()
                self._guard.send("-", worker.pid)
                worker.stdout.close()
                worker.stderr.close()
            self._guard.close()
            self._selector.close()
        if failed is None:
            return None
        # Its traceback may have arrived after its end was noticed.
        return self._workers[failed], failure_lines(self._last_lines[failed])

    def _supervise(self) -> int | None:
        """Run the workers to their end; return the number of the one that failed."""
        count = self._launcher.workers
        cluster = LocalCluster.on_free_ports(
            count, devices_per_worker=self._launcher.devices_per_worker
        )
        for rank in range(count):
            self._start_worker(rank, cluster.name(rank), cluster.variables(rank))
        self._watch = ProcessWatch(self._workers)
        end_at = math.inf
        while self._watch.running:
            self._forward_output()
            self._forward_signals()
            if (status := self._watch.poll()) is not None:
                # The worker that caused it is about to report why; preempted ones end
                # together.
                is_effect = status in (EXIT_OTHER_WORKER_FAILED, EXIT_PREEMPTED)
                end_at = time.monotonic() + (CAUSE_SECONDS if is_effect else 0)
            if time.monotonic() >= end_at:
                end_at = math.inf
                self._end_workers(signal.SIGTERM)
        return self._watch.failed

    def _start_worker(
        self,
        rank: int,
        name: str,
        variables: Mapping[str, str],
        descriptors: Sequence[int] = (),
    ) -> WorkerProcess:
        workers = self._launcher.workers
        worker = WorkerProcess(
            name,
            self._launcher.command,
            {
                **thread_limits(workers),
                **os.environ,
                **gpu_variables(rank, workers, self._launcher.gpus_per_worker),
                **self._launcher.variables,
                **variables,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            descriptors=descriptors,
        )
        self._guard.send("+", worker.pid)
        self._workers.append(worker)
        last_lines = collections.deque[bytes](maxlen=_MAX_LAST_LINES)
        self._last_lines.append(last_lines)
        for source, target in (
            (worker.stdout.fileno(), sys.stdout.buffer),
            (worker.stderr.fileno(), sys.stderr.buffer),
        ):
            stream = PrefixedStream(source, target, name, rank, last_lines)
            self._selector.register(source, selectors.EVENT_READ, stream)
        return worker

    def _forward_signals(self) -> None:
        for number in self._signals[self._num_forwarded :]:
            # A second signal means that the user does not want to wait.
            self._end_workers(number if not self._num_forwarded else signal.SIGKILL)
            self._num_forwarded += 1

    def _end_workers(self, number: int) -> None:
        for worker in self._workers:
            worker.signal(number)
        self._watch.let_end(self._launcher.grace_seconds)

    def _forward_output(self) -> None:
        # It also waits when the workers have closed their output and still run.
        for key, _ in self._selector.select(_WAKE_SECONDS):
            if not key.data.read():
                self._selector.unregister(key.fileobj)


def failure_lines(last_lines: Iterable[bytes]) -> list[bytes]:
    """Return the lines from this library's reason or a traceback, or the last few."""
    lines = list(last_lines)
    for begin in (rb"keras_strategy: .+ ends\.", rb"Traceback \(most recent call"):
        for number, line in enumerate(lines):
            if re.match(begin, line):
                return lines[number:]
    return lines[-_LAST_LINES_WITHOUT_TRACEBACK:]


class PrefixedStream:
    """Stream of a worker, forwarded by lines with the worker's name in front."""

    def __init__(
        self,
        source: int,
        target: BinaryIO,
        name: str,
        number: int,
        last_lines: collections.deque[bytes],
    ) -> None:
        self._source, self._target = source, target
        self._prefix = f"{name} | ".encode()
        if target.isatty() and not os.environ.get("NO_COLOR"):
            colour = _COLOURS[number % len(_COLOURS)]
            self._prefix = b"\x1b[%dm%s\x1b[0m" % (colour, self._prefix)
        self._last_lines = last_lines
        self._rest = b""

    def read(self) -> bool:
        """Forward available data; return False when the stream has ended."""
        data = os.read(self._source, 1 << 16)
        if not data:
            self.finish()
            return False
        *lines, self._rest = _LINE_END.split(self._rest + data)
        if len(self._rest) > _MAX_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        self._write(lines)
        return True

    def finish(self) -> None:
        """Forward a last line without an end."""
        if self._rest:
            self._write([self._rest.removesuffix(b"\r")])
            self._rest = b""

    def _write(self, lines: list[bytes]) -> None:
        self._last_lines.extend(lines)
        # In one write, so that lines of different workers do not mix.
        self._target.write(b"".join(self._prefix + line + b"\n" for line in lines))
        self._target.flush()
