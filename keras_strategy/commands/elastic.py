"""Launcher of elastic training: workers go on when others end, or join.

The workers' side of the protocol is in `keras_strategy.cluster.elastic`.
"""

import contextlib
import dataclasses
import json
import selectors
import signal
import socket
import time
from typing import Any

from keras_strategy.cluster.elastic import CHANNEL_VARIABLE
from keras_strategy.cluster.process_exit import EXIT_OTHER_WORKER_FAILED, EXIT_PREEMPTED
from keras_strategy.commands.launcher import (
    Launcher,
    WorkerTeam,
    print_line,
    restart_seconds,
)
from keras_strategy.commands.local_cluster import LocalCluster, shared_variables
from keras_strategy.commands.processes import WorkerProcess, exit_text


@dataclasses.dataclass(frozen=True)
class ElasticLauncher(Launcher):
    """Launcher of a program that calls `run_elastic`; it restarts single workers."""

    min_workers: int = 1

    @property
    def team_restarts(self) -> int:
        return 0

    def create_team(self, signals: list[int]) -> WorkerTeam:
        return _ElasticTeam(self, signals)


class _Slot:
    """A worker, whose process may be started again."""

    def __init__(self, index: int):
        self.index, self.name = index, f"worker {index}"
        self.process: WorkerProcess | None = None
        self.number = 0  # of the process, in the order of their start
        self.start_at: float | None = 0.0  # None if it is not started again
        self.channel: Any = None
        # For the cause of an end that another worker caused.
        self.wait_until: float | None = None
        self.is_ready = self.is_dismissed = False
        self.cluster = 0  # the last one of the process, 0 for none

    @property
    def is_starting(self) -> bool:
        is_fresh = not self.is_ready and self.cluster == 0
        return self.start_at is not None or (self.process is not None and is_fresh)

    def read(self) -> bool:
        """Read from the channel; return False when it has ended."""
        data = b""
        with contextlib.suppress(OSError):
            data = self.channel.recv(4096)
        self.is_ready = self.is_ready or bool(data)
        return bool(data)

    def finish(self) -> None:
        """Do nothing: half a message has no meaning."""

    def send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # it has just ended
            self.channel.sendall(json.dumps(message).encode() + b"\n")


class _ElasticTeam(WorkerTeam):
    """Workers that form one cluster after the other."""

    _launcher: ElasticLauncher

    def _supervise(self) -> int | None:
        self._slots = [_Slot(index) for index in range(self._launcher.workers)]
        self._cluster = self._ended = 0  # the last cluster, and the last that ended
        self._restarts = self._failures = 0
        self._is_ending = False
        self._kill_at = self._late_at = None
        self._is_complete = False  # whether a worker has ended with 0
        self._failed: int | None = None
        while True:
            for slot in self._slots:
                if slot.start_at is not None and time.monotonic() >= slot.start_at:
                    self._start(slot)
            self._forward_output()
            self._forward_signals()
            self._handle_ended()
            if not any(s.process or s.start_at is not None for s in self._slots):
                return self._failed
            if self._is_complete:
                self._dismiss_waiting()
            elif not self._is_ending:
                self._form_cluster()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._signal(signal.SIGKILL, self._slots)

    def _start(self, slot: _Slot) -> None:
        slot.channel, end = socket.socketpair()
        with end:
            variables = {CHANNEL_VARIABLE: str(end.fileno()), **shared_variables()}
            slot.number = len(self._workers)
            slot.process = self._start_worker(
                slot.index, slot.name, variables, [end.fileno()]
            )
        slot.start_at, slot.is_ready, slot.cluster = None, False, 0
        self._selector.register(slot.channel, selectors.EVENT_READ, slot)

    def _handle_ended(self) -> None:
        ended = []
        for slot in self._slots:
            if slot.process is not None and (status := slot.process.poll()) is not None:
                ended.append((slot, status))
        # Causes before their effects, which wait for them.
        ended.sort(key=lambda pair: pair[1] == EXIT_OTHER_WORKER_FAILED)
        for slot, status in ended:
            if status == EXIT_OTHER_WORKER_FAILED and self._may_have_cause(slot):
                continue
            with contextlib.suppress(KeyError):
                self._selector.unregister(slot.channel)
            slot.channel.close()
            self._guard.send("-", slot.process.pid)
            slot.process, slot.is_ready, slot.wait_until = None, False, None
            if status == 0:
                self._stop_starting()
                self._is_complete = True
            elif not self._is_ending:
                self._handle_failure(slot, status)
            elif self._failed is None and not slot.is_dismissed:
                self._failed = slot.number

    def _may_have_cause(self, slot: _Slot) -> bool:
        """Return whether another worker of its cluster may still end as the cause."""
        if slot.cluster <= self._ended:
            return False  # the cause has ended
        now = time.monotonic()
        slot.wait_until = slot.wait_until or now + self._launcher.grace_seconds
        # It may be saving, or be slow to end.
        return now < slot.wait_until and any(
            other.process and other.process.poll() is None
            for other in self._slots
            if other.cluster == slot.cluster
        )

    def _handle_failure(self, slot: _Slot, status: int) -> None:
        is_effect = (
            status == EXIT_OTHER_WORKER_FAILED and 0 < slot.cluster <= self._ended
        )
        if slot.cluster == self._cluster:
            self._end_cluster()
        reason = f"{slot.name} {exit_text(status)}."
        if is_effect:
            slot.start_at = time.monotonic()
        elif self._restarts < self._launcher.max_restarts:
            self._restarts += 1
            self._failures = 0 if status == EXIT_PREEMPTED else self._failures + 1
            seconds = restart_seconds(self._failures)
            slot.start_at = time.monotonic() + seconds
            print_line(
                f"{reason} It starts again in {seconds:.0f} s (restart "
                f"{self._restarts} of {self._launcher.max_restarts})."
            )
        else:
            print_line(f"{reason} It is not started again.")
        left = [s for s in self._slots if s.process or s.start_at is not None]
        if len(left) < self._launcher.min_workers:
            self._failed = slot.number
            self._end_workers(signal.SIGTERM)

    def _form_cluster(self) -> None:
        """Form a cluster of the workers that are ready, if all of them are."""
        ready = [slot for slot in self._slots if slot.is_ready]
        if not ready:
            return
        late = [s for s in self._slots if s.process and s.cluster and not s.is_ready]
        if late:
            self._end_cluster()
            # All leave together: one that does not is stuck.
            if self._late_at is None and any(slot.cluster for slot in ready):
                self._late_at = time.monotonic() + self._launcher.grace_seconds
            if self._late_at is not None and time.monotonic() >= self._late_at:
                self._signal(signal.SIGKILL, late)
            return
        self._late_at = None
        # Workers that have trained do not wait for those that start.
        is_enough = len(ready) >= self._launcher.min_workers
        has_trained = any(slot.cluster for slot in ready)
        if any(s.is_starting for s in self._slots) and not (is_enough and has_trained):
            return
        self._cluster += 1
        self._failures = 0
        cluster = LocalCluster.on_free_ports(
            len(ready),
            devices_per_worker=self._launcher.devices_per_worker,
            indices=tuple(slot.index for slot in ready),
        )
        names = ", ".join(slot.name for slot in ready)
        print_line(f"{len(ready)} of {len(self._slots)} workers train: {names}.")
        for rank, slot in enumerate(ready):
            variables = cluster.variables(rank)
            slot.send({"cluster": self._cluster, "variables": variables})
            slot.is_ready, slot.cluster = False, self._cluster

    def _end_cluster(self) -> None:
        """Have the workers of the current cluster leave it."""
        if self._ended < self._cluster:
            self._ended = self._cluster
            for slot in self._slots:
                if slot.process and slot.cluster == self._cluster:
                    slot.send({"ends": self._cluster})

    def _dismiss_waiting(self) -> None:
        """End the workers that do not train, when the others have ended."""
        for slot in self._slots:
            if slot.process is not None and (slot.is_ready or slot.is_starting):
                slot.is_dismissed = True
                slot.process.signal(signal.SIGKILL)

    def _end_workers(self, number: int) -> None:
        self._stop_starting()
        self._signal(number, self._slots)
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self._launcher.grace_seconds

    def _stop_starting(self) -> None:
        self._is_ending = True
        for slot in self._slots:
            slot.start_at = None

    def _signal(self, number: int, slots: list[_Slot]) -> None:
        for slot in slots:
            if slot.process is not None:
                slot.process.signal(number)
