"""When a worker cannot go on: a state machine without a thread, a socket or a clock.

What happens is told to it, with the time; it answers what is to be done.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# How long the hub may take to ask all the others who keeps this worker waiting. A
# process that is well says within this time what it is doing.
ANSWER_SECONDS = 5.0
# How long a worker waits before it has the hub find out whether all of them wait for
# each other.
DEADLOCK_SECONDS = 5.0
# How long the others may still take over an operation after one of them has left.
LEFT_SECONDS = 5.0
# How long to wait for the hub to pass a failure on, before ending without it.
VERDICT_SECONDS = 2.0


class Operation(NamedTuple):
    """What a worker waits in: its number among all, its name, and since when.

    How long it may take is said where it is not as long as any other.
    """

    count: int
    name: str
    since: float
    seconds: float | None = None


class Send(NamedTuple):
    """To be done: the hub is to be told this."""

    message: dict[str, Any]


class Fail(NamedTuple):
    """To be done, and the last thing: this worker cannot go on, and this is why."""

    message: str
    details: str = ""


Actions = list[Send | Fail]


class Watchdog:
    """Decides from what a worker hears, and for how long it waits, when to give up.

    Args:
        rank: Which of the workers this is.
        names: What messages call the workers, by rank.
        timeout_seconds: How long an operation may take.
        now: The time, as in all that follows.
    """

    def __init__(self, rank: int, names: list[str], timeout_seconds: float, now: float):
        self._names, self._name = names, names[rank]
        self._timeout = timeout_seconds
        # How often it wants to `look`.
        self.interval = min(1.0, timeout_seconds / 4)
        # When it looked last, and since when it has been doing so regularly.
        self._looked_at = self._awake_since = now
        self._heard_at = now
        # Who has left, and when the last one did.
        self._left: list[str] = []
        self._left_at = now
        # The operation about which the hub was asked whether all wait for each other.
        # Who comes last to a deadlock asks last, so that once is enough.
        self._suspected: Operation | None = None
        # The operation about which the hub has been asked, and when.
        self._asked: tuple[Operation, float] | None = None
        # A failure that the hub has been told and has not told back, and until when
        # it may.
        self._claim: tuple[Fail, float] | None = None
        self._hub_gone = self._leaving = self._over = False

    def hear(self, message: Mapping[str, Any], now: float) -> Actions:
        """The hub has sent a message."""
        self._notice(now)
        self._heard_at = now
        if message["type"] == "left":
            self._left.append(self._names[message["rank"]])
            self._left_at = now
        elif message["type"] == "failed":
            return self._end(Fail(message["message"], message["details"]))
        return []

    def lose(self, why: str) -> Actions:
        """The connection to the hub is over: the chief "is gone", in words."""
        self._hub_gone = True
        if self._leaving or self._names[0] in self._left:
            return []
        # At once: an engine that lost its chief may end the process.
        gone = Fail(f"{self._names[0]} {why}")
        return self._end(self._claim[0] if self._claim else gone)

    def fail(self, message: str, details: str, now: float) -> Actions:
        """This worker cannot go on; the hub is to tell all, this one included."""
        failure = Fail(message, details)
        if self._hub_gone:
            return self._end(failure)
        if self._claim is None:
            self._claim = failure, now + VERDICT_SECONDS
        return [Send({"type": "failed", **failure._asdict()})]

    def leave(self) -> None:
        """This worker leaves, and waits for nobody any more."""
        self._leaving = True

    def look(self, operation: Operation | None, now: float) -> Actions:
        """Some time has passed, and this worker waits in an operation, or in none."""
        self._notice(now)
        if self._claim is not None:
            failure, until = self._claim
            return self._end(failure) if now >= until else []
        if operation is None or self._leaving or self._over:
            return []
        waited = self.waited(operation, now)
        if self._left and min(waited, now - self._left_at) > LEFT_SECONDS:
            return self.blame_who_left(operation.name, "", now)
        if waited > (operation.seconds or self._timeout):
            return self._inquire(operation, now)
        if waited > DEADLOCK_SECONDS and self._suspected is not operation:
            self._suspected = operation
            return [Send({"type": "inquire", "count": operation.count})]
        return []

    def blame_who_left(self, operation: str, details: str, now: float) -> Actions:
        """An operation cannot be ended without those who have left, if any have."""
        if not self._left:
            return []
        gone = " and ".join(self._left)
        waits = f"{self._name} was waiting for it in `{operation}`"
        return self.fail(f"{gone} ended while {waits}", details, now)

    def waited(self, operation: Operation, now: float) -> float:
        """For how long this worker has been in an operation, while it ran."""
        return now - max(operation.since, self._awake_since)

    def _notice(self, now: float) -> None:
        # The time during which this process was stopped, as by Ctrl-Z, or its machine
        # asleep, is nobody's fault.
        if now - self._looked_at > 3 * self.interval:
            self._awake_since = now
        self._looked_at = now

    def _inquire(self, operation: Operation, now: float) -> Actions:
        """Has the hub ask who keeps the others waiting."""
        timeout = operation.seconds or self._timeout
        asked, asked_at = self._asked or (None, now)
        overdue = now - asked_at > ANSWER_SECONDS
        # A hub that is well asks everybody at once, this worker included.
        answered = self._heard_at > asked_at
        if asked is not operation or (overdue and answered):
            self._asked = operation, now
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
        if self._over:
            return []
        self._over = True
        return [failure]
