"""All workers of one attempt: they start together and end together."""

import dataclasses
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from keras_strategy.launch.environment import LocalCluster, thread_limits
from keras_strategy.launch.output import LastLines, PrefixedStream
from keras_strategy.launch.processes import Guard, WorkerProcess
from keras_strategy.launch.signals import ReceivedSignals
from keras_strategy.launch.watch import ProcessWatch
from keras_strategy.workers.exit_codes import EXIT_OTHER_WORKER_FAILED, EXIT_PREEMPTED

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
