"""Watchdog: decides when a worker gives up, without a thread, a socket or a clock.

Its caller passes in events with their time, and carries out the returned actions.
Slow operations are logged once for each name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

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

logger = logging.getLogger("keras_strategy")


class Operation(NamedTuple):
    """Operation in which a worker waits for others; `seconds` is its own time limit."""

    count: int
    name: str
    since: float
    seconds: float | None = None


class Send(NamedTuple):
    """Action: send a message to the coordinator."""

    message: dict[str, Any]


class Fail(NamedTuple):
    """Final action: this worker cannot continue, for this reason."""

    message: str
    details: str = ""


Actions = list[Send | Fail]


class Watchdog:
    """State machine that turns messages and waiting times into actions.

    All methods take the current time as `now`.
    """

    def __init__(self, rank: int, names: list[str], timeout_seconds: float, now: float):
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
        self._reported: tuple[Fail, float] | None = None
        self._disconnected = self._leaving = self._ended = False

    def on_message(self, message: Mapping[str, Any], now: float) -> Actions:
        """Handle a message of the coordinator."""
        self._record_call(now)
        self._last_message = now
        if message["type"] == "left":
            self._left.append(self._names[message["rank"]])
            self._left_at = now
        elif message["type"] == "failed":
            return self._end(Fail(message["message"], message["details"]))
        return []

    def on_disconnect(self, why: str) -> Actions:
        """Handle the loss of the coordinator; `why` completes "chief ..."."""
        self._disconnected = True
        if self._leaving or self._names[0] in self._left:
            return []
        # At once: a backend that lost its chief may end the process.
        lost = Fail(f"{self._names[0]} {why}")
        return self._end(self._reported[0] if self._reported else lost)

    def report_failure(self, message: str, details: str, now: float) -> Actions:
        """Have the coordinator relay this worker's failure to all, itself included."""
        failure = Fail(message, details)
        if self._disconnected:
            return self._end(failure)
        if self._reported is None:
            self._reported = failure, now + RELAY_SECONDS
        return [Send({"type": "failed", **failure._asdict()})]

    def leave(self) -> None:
        """Stop watching: this worker leaves and waits for nobody."""
        self._leaving = True

    def check(self, operation: Operation | None, now: float) -> Actions:
        """Check this worker's current operation."""
        self._record_call(now)
        if self._reported is not None:
            failure, until = self._reported
            return self._end(failure) if now >= until else []
        if operation is None or self._leaving or self._ended:
            return []
        waited = self.waited(operation, now)
        if self._left and min(waited, now - self._left_at) > LEFT_SECONDS:
            return self.report_missing_workers(operation.name, "", now)
        if waited > (operation.seconds or self._timeout):
            return self._inquire(operation, now)
        if waited > DEADLOCK_SECONDS and self._suspected is not operation:
            self._suspected = operation
            return [Send({"type": "inquire", "count": operation.count})]
        return []

    def report_missing_workers(
        self, operation: str, details: str, now: float
    ) -> Actions:
        """Report that an operation cannot finish without the workers that left."""
        if not self._left:
            return []
        left = " and ".join(self._left)
        waiting = f"{self._name} was waiting for it in `{operation}`"
        return self.report_failure(f"{left} ended while {waiting}", details, now)

    def waited(self, operation: Operation, now: float) -> float:
        """Return the seconds in an operation during which this process ran."""
        return now - max(operation.since, self._awake_since)

    def _record_call(self, now: float) -> None:
        # Time during which this process was stopped (Ctrl-Z) or its machine asleep
        # does not count.
        if now - self._last_call > 3 * self.interval:
            self._awake_since = now
        self._last_call = now

    def _inquire(self, operation: Operation, now: float) -> Actions:
        """Have the coordinator find out who holds up the others."""
        timeout = operation.seconds or self._timeout
        inquired, inquired_at = self._inquiry or (None, now)
        overdue = now - inquired_at > ANSWER_SECONDS
        # A healthy coordinator asks all workers at once, this one included.
        answered = self._last_message > inquired_at
        if inquired is not operation or (overdue and answered):
            self._inquiry = operation, now
            question = {"count": operation.count, "timeout": timeout}
            return [Send({"type": "inquire", **question})]
        if not overdue:
            return []
        return self._end(
            Fail(
                f"{self._names[0]} does not answer, and {self._name} has been in "
                f"`{operation.name}` for more than {timeout:g} s: its process is "
                "stopped, or one long call keeps Python busy"
            )
        )

    def _end(self, failure: Fail) -> Actions:
        if self._ended:
            return []
        self._ended = True
        return [failure]


class SlowOperationWarnings:
    """Logger of slow operations, once for each name."""

    def __init__(self, name: str, timeout_seconds: float):
        self._name, self._timeout = name, timeout_seconds
        self._warned: set[str] = set()

    def check(self, operation: Operation, waited: float) -> None:
        """Warn if the operation has taken `waited` seconds and that is slow."""
        if waited < SLOW_OPERATION_SECONDS or operation.name in self._warned:
            return
        # By name, since each step is a new operation.
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
        """Warn that these workers have not arrived yet."""
        logger.warning(
            "%s has waited for %s to arrive for %.0f s. It gives up after %g s.",
            self._name,
            " and ".join(missing),
            SLOW_OPERATION_SECONDS,
            self._timeout,
        )
