"""The thread of a worker that hears of failures, and looks for them."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import select
import socket
import threading
import time
from typing import Any

from keras_strategy.workers import ending
from keras_strategy.workers.hub import ANSWER_SECONDS
from keras_strategy.workers.verdict import State
from keras_strategy.workers.wire import Lines, ProtocolError, decode, encode

# How long the others may still take over an operation after one of them has left.
LEFT_SECONDS = 5.0
# How long to wait for the hub to pass a failure on, before ending without it.
VERDICT_SECONDS = 2.0


class Position:
    """Where a worker is: written by its own thread, read by its watchdog's.

    Attributes:
        thread_id: Its own thread.
        count: How many operations it has entered.
        last: The one that it entered last.
        operation: The one that it is in: (count, name, since when).
    """

    __slots__ = ("count", "last", "operation", "thread_id")

    def __init__(self) -> None:
        self.thread_id = threading.get_ident()
        self.count = 0
        self.last = ""
        self.operation: tuple[int, str, float] | None = None


class Watchdog:
    """Reads what the hub sends, and notices when this worker waits for too long.

    Args:
        connection: The connection to the hub.
        lines: What has arrived on it.
        position: What this worker is doing.
        rank: Which of the workers this is.
        names: What messages call the workers, by rank.
        timeout_seconds: How long an operation may take.
    """

    def __init__(
        self,
        connection: socket.socket,
        lines: Lines,
        position: Position,
        rank: int,
        names: list[str],
        timeout_seconds: float,
    ):
        self._connection, self._lines, self._position = connection, lines, position
        self._chief, self._name = names[0], names[rank]
        self._names = names
        self._timeout = timeout_seconds
        self._sending = threading.Lock()
        # Who has not arrived yet; set when all have, or cannot any more.
        self.missing = list(names)
        self.settled = threading.Event()
        # Requests that wait for their replies, which are None when none will come.
        self.pending: dict[int, queue.SimpleQueue] = {}
        # What ends everything, once it is known to all.
        self.failure: str | None = None
        self.failed = threading.Event()
        # Whether a failure may end the process, and whether another thread does it.
        self.exit_process = False
        self.raising = False
        self.lock = threading.Lock()
        self.leaving = threading.Event()
        self.hub_gone = False
        # Who has left, and when the last one did.
        self._ended: list[str] = []
        self._ended_at = 0.0
        # A failure that the hub has been told and has not told back: until when it
        # may, and the failure.
        self._claim: tuple[float, str, str] | None = None
        # The operation about which the hub has been asked, and when.
        self._asked: tuple[int, str, float] | None = None
        self._asked_at = 0.0
        self._heard_at = 0.0
        # When this thread last looked, and since when it has been doing so regularly.
        self._looked_at = self._awake_since = time.monotonic()
        self._thread = threading.Thread(
            target=self._watch, name="keras_strategy watchdog", daemon=True
        )

    def start(self, received: list[bytes]) -> None:
        """Starts the thread, with the lines that have been read already."""
        for line in received:
            self._handle(decode(line))
        self._thread.start()

    def stop(self) -> None:
        """Says goodbye to the hub, and ends the thread."""
        self.leaving.set()
        if self._thread.is_alive():
            # The hub answers by closing the connection.
            self.send(encode({"type": "bye"}))
            self._thread.join(VERDICT_SECONDS)
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._thread.join(VERDICT_SECONDS)
        self._connection.close()
        self._wake()

    def forget(self) -> None:
        """Closes a forked child's copy of the connection."""
        self.leaving.set()
        self._connection.close()

    def join(self, seconds: float) -> None:
        """Waits for the thread, which is about to end the process."""
        self._thread.join(seconds)

    def send(self, line: bytes) -> None:
        """Sends a line to the hub, if it is there; the thread notices if it is not."""
        with contextlib.suppress(OSError), self._sending:
            self._connection.sendall(line)

    def fail(self, message: str, details: str = "") -> None:
        """Tells all workers, this one included, that they cannot go on."""
        wait = 0.0 if self.hub_gone else VERDICT_SECONDS
        self._claim_failure(wait, message, details)
        self.send(encode({"type": "failed", "message": message, "details": details}))

    def report(self, failure: str) -> str:
        """What a process writes when a failure ends it."""
        return f"keras_strategy: {self._name} ends. {failure}"

    def _claim_failure(self, seconds: float, message: str, details: str = "") -> None:
        if self._claim is None:
            self._claim = (time.monotonic() + seconds, message, details)

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        interval = min(1.0, self._timeout / 4)
        self._looked_at = time.monotonic()
        while not (self.hub_gone and self.leaving.is_set()):
            if self.hub_gone:
                self.leaving.wait(interval)
                ready = False
            else:
                ready = bool(poller.poll(1000 * interval))
            now = time.monotonic()
            # The time during which this process was stopped, as by Ctrl-Z, or its
            # machine asleep, is nobody's fault.
            if now - self._looked_at > 3 * interval:
                self._awake_since = now
            self._looked_at = now
            if ready:
                self._receive()
            self._look(now)

    def _receive(self) -> None:
        why = "its process was killed or crashed"
        try:
            data = self._connection.recv(1 << 16)
            for line in self._lines.feed(data):
                self._handle(decode(line))
            if data:
                return
        except OSError as error:
            why = f"its process crashed, or its machine is gone: {error}"
        except ProtocolError as error:
            why = f"what it sent cannot be understood: {error}"
        self.hub_gone = True
        if not self.leaving.is_set() and self._chief not in self._ended:
            self._claim_failure(0, f"{self._chief} is gone without a word ({why})")
        elif self.failure is None:
            self._wake()

    def _handle(self, message: dict[str, Any]) -> None:
        self._heard_at = time.monotonic()
        kind = message["type"]
        if kind == "reply":
            replies = self.pending.get(message["id"])
            if replies is not None:
                replies.put(message)
        elif kind == "arrived":
            self.missing = message["missing"]
            if not self.missing:
                self.settled.set()
        elif kind == "report":
            state = dataclasses.asdict(self._state())
            self.send(encode({"type": "state", **state}))
        elif kind == "left":
            self._ended.append(self._names[message["rank"]])
            self._ended_at = time.monotonic()
        elif kind == "failed":
            self._settle(message["message"], message["details"])

    def _state(self) -> State:
        position = self._position
        operation = position.operation
        where, stack = ending.stack_of(position.thread_id)
        if operation is None:
            return State(position.count, position.last, None, 0.0, where, stack)
        seconds = time.monotonic() - max(operation[2], self._awake_since)
        return State(position.count, position.last, operation[1], seconds, where, stack)

    def _look(self, now: float) -> None:
        """Fails when this worker has been waiting for too long."""
        if self._claim is not None:
            # At once, if it may be: an engine that lost its chief may end the process.
            if time.monotonic() >= self._claim[0]:
                self._settle(*self._claim[1:])
            return
        operation = self._position.operation
        if operation is None or self.failure is not None or self.leaving.is_set():
            return
        name, since = operation[1], max(operation[2], self._awake_since)
        if self._ended and now - max(since, self._ended_at) > LEFT_SECONDS:
            gone = " and ".join(self._ended)
            self.fail(f"{gone} ended while {self._name} was waiting for it in `{name}`")
        elif now - since > self._timeout:
            self._inquire(operation, now)

    def _inquire(self, operation: tuple[int, str, float], now: float) -> None:
        """Has the hub ask who keeps the others waiting."""
        overdue = now - self._asked_at > ANSWER_SECONDS
        # A hub that is well asks everybody at once, this worker included.
        answered = self._heard_at > self._asked_at
        if self._asked is not operation or (overdue and answered):
            self._asked, self._asked_at = operation, now
            question = {"count": operation[0], "timeout": self._timeout}
            self.send(encode({"type": "inquire", **question}))
        elif overdue:
            self._claim_failure(
                0,
                f"{self._chief} does not answer, and {self._name} has been in "
                f"`{operation[1]}` for more than {self._timeout:g} s: its process is "
                "stopped, or one long call keeps Python busy",
            )

    def _settle(self, message: str, details: str) -> None:
        """Takes a failure as final, and ends the process if that may be done."""
        with self.lock:
            if self.failure is not None:
                return
            text = message
            operation = self._position.operation
            if operation is not None:
                text += f" [{self._name} was in `{operation[1]}`]"
            if details:
                text += "\n" + details.rstrip()
            self.failure = text
            # The thread that raises ends the process, when it has been heard.
            end_here = self.exit_process and not self.raising
        self.failed.set()
        self.settled.set()
        if end_here:
            ending.exit_now(self.report(text))
        self._wake()

    def _wake(self) -> None:
        for replies in list(self.pending.values()):
            replies.put(None)
