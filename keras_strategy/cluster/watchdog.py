"""Watchdog of a worker: the trace of its operations, and when it gives up.

`Watchdog` has neither a thread nor a socket nor a clock: its caller passes in events
with their time, and two functions that carry out what it decides.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from keras_strategy.errors import logger

# Time for all workers to report their state to the coordinator. A healthy process
# answers within this time.
ANSWER_SECONDS = 5.0
# Wait after which a worker has the coordinator check for a deadlock.
DEADLOCK_SECONDS = 5.0
# Time for the remaining workers to finish an operation after one has left.
LEFT_SECONDS = 5.0
# Time for the coordinator to relay a failure, before the worker ends without it.
RELAY_SECONDS = 2.0
# Time after which an operation counts as slow.
SLOW_OPERATION_SECONDS = 10.0

_MAX_FRAMES = 6
# Operations since the last exchange that a report names.
_MAX_NAMES = 64


class Operation(NamedTuple):
    """Operation in which a worker waits for others; `seconds` is its own time limit."""

    count: int
    name: str
    since: float
    seconds: float | None = None


class WorkerState(NamedTuple):
    """A worker's report of what it is doing."""

    # Operations entered, and the name of the last one.
    count: int
    last: str
    # The current operation, in which nested ones may have ended since, its time, and
    # the operations entered up to and including it.
    inside: str | None
    seconds: float
    entered: int
    # The current line of the program, and the main thread's innermost frames.
    where: str
    stack: str
    # Completed exchanges with all workers, and the operations since the last one: the
    # number that `since` omits, and names.
    exchanges: int
    before: int
    since: list[str]
    # What else is compared between workers, by topic.
    notes: dict[str, str]


class OperationTrace:
    """Operations of a worker: written by its main thread, read by its watchdog."""

    def __init__(self) -> None:
        self.last = ""
        self.operation: Operation | None = None
        self.notes: dict[str, str] = {}
        self._thread_id = threading.get_ident()
        self._count = 0
        self._exchanges = self._count_at_exchange = 0
        # Operations since the last exchange, each with its number since then.
        self._since: deque[tuple[int, str]] = deque(maxlen=_MAX_NAMES)

    def enter(self, name: str, seconds: float | None = None) -> Operation | None:
        """Enter an operation, with its own time limit if any; return the outer one."""
        outer = self.operation
        self._count = count = self._count + 1
        self.last = name
        self._since.append((count - self._count_at_exchange, name))
        self.operation = Operation(count, name, time.monotonic(), seconds)
        return outer

    def record_exchange(self) -> None:
        """Record that all workers are at the same place in the program."""
        self._exchanges += 1
        self._count_at_exchange = self._count
        self._since.clear()

    def state(self, watchdog: Watchdog, now: float) -> WorkerState:
        # The main thread changes the trace meanwhile: read each attribute once.
        count, last, operation = self._count, self.last, self.operation
        since = list(self._since)
        where, stack = self._stack()
        return WorkerState(
            count,
            last,
            inside=operation and operation.name,
            seconds=watchdog.waited(operation, now) if operation else 0.0,
            entered=operation.count if operation else 0,
            where=where,
            stack=stack,
            exchanges=self._exchanges,
            before=since[0][0] - 1 if since else 0,
            since=[name for _, name in since],
            notes={**self.notes},
        )

    def _stack(self) -> tuple[str, str]:
        """Return the current line of the thread, and its innermost frames."""
        frame = sys._current_frames().get(self._thread_id)
        if frame is None:
            return "a thread that has ended", ""
        frames = traceback.StackSummary.extract(
            traceback.walk_stack(frame), limit=_MAX_FRAMES, lookup_lines=True
        )
        frames.reverse()
        last = frames[-1]
        where = f"{last.name} ({last.filename}, line {last.lineno}"
        where += f": {last.line})" if last.line else ")"
        return where, "".join(frames.format())


class Watchdog:
    """State machine that acts on messages and waiting times, at `now`."""

    # `send` gets messages for the coordinator, and `fail` once why this worker cannot
    # continue, with details.

    def __init__(
        self,
        rank: int,
        names: list[str],
        timeout_seconds: float,
        now: float,
        send: Callable[[dict[str, Any]], object],
        fail: Callable[[str, str], object],
    ):
        self._send, self._fail = send, fail
        self._names, self._name = names, names[rank]
        self._timeout = timeout_seconds
        # Seconds between two calls of `check`.
        self.interval = min(1.0, timeout_seconds / 4)
        # When it was last called, and since when it has been called regularly.
        self._last_call = self._awake_since = now
        self._last_message = now
        # Workers that have left, and when the last one did.
        self._left: list[str] = []
        self._left_at = now
        # The operation for which a deadlock check was requested. The last worker to
        # enter a deadlock asks last, so one request is enough.
        self._suspected: Operation | None = None
        # The last inquiry after a timeout, and its time.
        self._inquiry: tuple[Operation, float] | None = None
        # A failure that the coordinator has not relayed yet, and its deadline.
        self._reported: tuple[str, str] | None = None
        self._relay_until = now
        self.disconnected = self.leaving = self._ended = False
        # Names of the operations that were logged as slow.
        self._warned: set[str] = set()

    def on_message(self, message: Mapping[str, Any], now: float) -> None:
        self._record_call(now)
        self._last_message = now
        if message["type"] == "left":
            self._left.append(self._names[message["rank"]])
            self._left_at = now
        elif message["type"] == "failed":
            self._end(message["message"], message["details"])

    def on_disconnect(self, why: str) -> None:
        """Handle the loss of the coordinator; `why` completes "chief ..."."""
        self.disconnected = True
        if not self.leaving and self._names[0] not in self._left:
            # At once: a backend that lost its chief may end the process.
            self._end(*(self._reported or (f"{self._names[0]} {why}", "")))

    def report_failure(self, message: str, details: str, now: float) -> None:
        if self.disconnected:
            self._end(message, details)
            return
        if self._reported is None:
            self._reported = message, details
            self._relay_until = now + RELAY_SECONDS
        self._send({"type": "failed", "message": message, "details": details})

    def check(self, operation: Operation | None, now: float) -> None:
        self._record_call(now)
        if self._reported is not None:
            if now >= self._relay_until:
                self._end(*self._reported)
            return
        if operation is None or self.leaving or self._ended:
            return
        waited = self.waited(operation, now)
        if self._left and min(waited, now - self._left_at) > LEFT_SECONDS:
            self.report_missing_workers(operation.name, "", now)
        elif waited > (operation.seconds or self._timeout):
            self._inquire(operation, now)
        elif waited > DEADLOCK_SECONDS and self._suspected is not operation:
            self._suspected = operation
            self._send({"type": "inquire", "count": operation.count})

    def report_missing_workers(self, operation: str, details: str, now: float) -> bool:
        """Report that an operation lacks the workers that left, if any did."""
        if self._left:
            left = " and ".join(self._left)
            waiting = f"{self._name} was waiting for it in `{operation}`"
            self.report_failure(f"{left} ended while {waiting}", details, now)
        return bool(self._left)

    def waited(self, operation: Operation, now: float) -> float:
        """Return the seconds in an operation during which this process ran."""
        return now - max(operation.since, self._awake_since)

    def warn_if_slow(self, operation: Operation, now: float) -> None:
        """Log an operation that is slow, once for each name."""
        waited = self.waited(operation, now)
        # By name, since each step is a new operation.
        if waited < SLOW_OPERATION_SECONDS or operation.name in self._warned:
            return
        self._warned.add(operation.name)
        logger.warning(
            "%s has been in %s for %.0f s, where workers wait for each other. "
            "It gives up after %g s.",
            self._name,
            # Some names already contain code in backticks.
            operation.name if "`" in operation.name else f"`{operation.name}`",
            waited,
            operation.seconds or self._timeout,
        )

    def warn_missing(self, missing: list[str]) -> None:
        logger.warning(
            "%s has waited for %s to arrive for %.0f s. It gives up after %g s.",
            self._name,
            " and ".join(missing),
            SLOW_OPERATION_SECONDS,
            self._timeout,
        )

    def _record_call(self, now: float) -> None:
        # Time during which this process was stopped (Ctrl-Z) or its machine asleep
        # does not count.
        if now - self._last_call > 3 * self.interval:
            self._awake_since = now
        self._last_call = now

    def _inquire(self, operation: Operation, now: float) -> None:
        timeout = operation.seconds or self._timeout
        inquired, inquired_at = self._inquiry or (None, now)
        overdue = now - inquired_at > ANSWER_SECONDS
        # A healthy coordinator asks all workers at once, this one included.
        answered = self._last_message > inquired_at
        if inquired is not operation or (overdue and answered):
            self._inquiry = operation, now
            question = {"count": operation.count, "timeout": timeout}
            self._send({"type": "inquire", **question})
        elif overdue:
            self._end(
                f"{self._names[0]} does not answer, and {self._name} has been in "
                f"`{operation.name}` for more than {timeout:g} s: its process is "
                "stopped, or one long call keeps Python busy"
            )

    def _end(self, message: str, details: str = "") -> None:
        if not self._ended:
            self._ended = True
            self._fail(message, details)
