"""What a worker tells the hub and hears from it, in a thread of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import socket
import threading
import time
from typing import Any

from keras_strategy.errors import ClusterError, WorkerFailedError
from keras_strategy.workers import ending, patience
from keras_strategy.workers.exit_codes import PEER_FAILED
from keras_strategy.workers.loop import LoopThread
from keras_strategy.workers.meeting import connect, hold_place
from keras_strategy.workers.patience import Patience
from keras_strategy.workers.position import Position
from keras_strategy.workers.settings import host_port
from keras_strategy.workers.verdict import State
from keras_strategy.workers.watchdog import VERDICT_SECONDS, Actions, Fail, Watchdog
from keras_strategy.workers.wire import encode, forget, listen

# How long the thread may take to end the process.
_STOP_SECONDS = 10.0


class Connection:
    """A worker's connection to the hub, with a watchdog on it.

    Args:
        rank: Which of the workers this is.
        names: What messages call the workers, by rank.
        timeout_seconds: How long to wait for the others.

    Attributes:
        name: What messages call this worker.
        position: What this worker is doing.
        failure: Why the workers cannot go on, once it is known to all.
        failed: Set then.
        left: Whether this worker has left.
        ends_process: Whether the thread ends the process when the workers fail.
    """

    def __init__(self, rank: int, names: list[str], timeout_seconds: float):
        self.name, self._chief = names[rank], names[0]
        self._size = len(names)
        self._timeout = timeout_seconds
        self.position = Position()
        self.failure: str | None = None
        self.failed = threading.Event()
        self.left = False
        self.ends_process = False
        self._hub_gone = False
        # Where the reply to each request goes: None when none will come.
        self._replies: dict[int, queue.SimpleQueue] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._place: socket.socket | None = None
        self._watchdog = Watchdog(rank, names, timeout_seconds, time.monotonic())
        self._patience = Patience(names[rank], timeout_seconds)
        self._thread = LoopThread("keras_strategy watchdog")
        # Set when all have arrived, who are not missing any more.
        self._missing = names
        self._joined = self._thread.loop.create_future()

    def join(
        self, address: tuple[str, int], claim: dict[str, Any], secret: str
    ) -> None:
        """Connects to the hub, and waits until all workers have.

        Raises:
            ClusterError: If they do not come together.
            WorkerFailedError: If they do, and one fails at once.
        """
        self._place = hold_place(address, claim, secret)
        self._thread.run(self._join(address, claim, secret))

    def leaving(self) -> None:
        """Says that nobody shall wait for this worker any more."""
        self._thread.soon(self._send, encode({"type": "leaving"}))

    def leave(self) -> None:
        """Says goodbye to the hub, and ends the thread."""
        self.left = True
        self._thread.run(self._leave())
        self._thread.stop(VERDICT_SECONDS)
        if self._place is not None:
            self._place.close()
        self._wake()

    def forget(self) -> None:
        """Closes a forked child's copy of the connection."""
        self.left = True
        forget(*filter(None, (self._writer, self._place)))

    def ask(self, number: int, line: bytes, operation: str) -> queue.SimpleQueue:
        """Sends a request of this number; `answer` waits for what it returns."""
        self._replies[number] = reply = queue.SimpleQueue()
        # After that: a failure from here on wakes it.
        self.check(operation)
        self._thread.soon(self._send, line)
        return reply

    def answer(self, reply: queue.SimpleQueue) -> list[Any]:
        """The values of a reply, when it is there."""
        values = reply.get()
        if values is None:
            self.check()
            raise AssertionError("woken without a reason")
        return values

    def check(self, operation: str = "") -> None:
        """Raises what keeps this worker from going on, with this operation."""
        if self.failure is not None:
            self.stop_here()
            raise WorkerFailedError(self.failure)
        if self.left:
            raise RuntimeError("This worker has left its cluster.")
        if self._hub_gone:
            operation = operation or self.position.last
            raise WorkerFailedError(
                f"{self._chief} ended while {self.name} was waiting for it in "
                f"`{operation}`"
            )

    def stop_here(self) -> None:
        """Does not return, after a failure, where the thread ends the process."""
        if self.ends_process:
            self._thread.join(_STOP_SECONDS)

    def fail(self, message: str, details: str) -> str:
        """Tells all workers that this one cannot go on, and why.

        The thread does not end the process any more, unless it does so already.

        Returns:
            What to say of another failure that came first; empty where none did.
        """
        self._thread.run(self._take_over(message, details))
        self.failed.wait(VERDICT_SECONDS)
        other = self.failure and not self.failure.startswith(message)
        return self._report() if other else ""

    def blame_who_left(self, operation: str, details: str) -> None:
        """Tells all workers that an operation failed for want of one that has left."""

        async def blame() -> bool:
            now = time.monotonic()
            actions = self._watchdog.blame_who_left(operation, details, now)
            self._do(actions)
            return bool(actions)

        if self._thread.run(blame()):
            self.failed.wait(VERDICT_SECONDS + 1)

    # What follows is called in the thread.

    async def _join(
        self, address: tuple[str, int], claim: dict[str, Any], secret: str
    ) -> None:
        deadline = time.monotonic() + self._timeout
        loop = self._thread.loop
        loop.call_later(patience.SECONDS, self._say_who_is_missing, address)
        reader, self._writer = await connect(address, claim, secret, self._timeout)
        self._listening = asyncio.create_task(self._listen(reader))
        self._look()
        await asyncio.wait([self._joined], timeout=deadline - time.monotonic())
        if not self._joined.done():
            verb = "has" if len(self._missing) == 1 else "have"
            late = f"{verb} not arrived within {self._timeout:g} s"
            self._fail(f"{' and '.join(self._missing)} {late}")
        await self._joined

    async def _leave(self) -> None:
        self._watchdog.leave()
        if self._writer is not None:
            # The hub answers by closing the connection.
            self._send(encode({"type": "bye"}))
            await asyncio.wait([self._listening], timeout=VERDICT_SECONDS)
            self._writer.transport.abort()

    async def _take_over(self, message: str, details: str) -> None:
        self.ends_process = False
        self._fail(message, details)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        why = await listen(reader, self._hear)
        if self._writer is not None and not reader.at_eof():
            # It is still there, and the others do not know.
            message = f"{self._chief} {why}"
            self._send(encode({"type": "failed", "message": message, "details": ""}))
        self._hub_gone = True
        self._do(self._watchdog.lose(why))
        self._wake()

    def _hear(self, message: dict[str, Any]) -> None:
        now = time.monotonic()
        self._do(self._watchdog.hear(message, now))
        kind = message["type"]
        if kind == "reply":
            self._replies.pop(message["id"]).put(self._values(message))
        elif kind == "arrived":
            self._missing = message["missing"]
            if not self._missing and not self._joined.done():
                self._joined.set_result(None)
        elif kind == "report":
            state = dataclasses.asdict(self._state(now))
            said = {"inquiry": message["inquiry"], "state": state}
            self._send(encode({"type": "state", **said}))

    def _values(self, reply: dict[str, Any]) -> list[Any]:
        """The values of all, of which those that are the same have come once."""
        said = reply["said"]
        return [said[n] for n in reply.get("which", [0] * self._size)]

    def _say_who_is_missing(self, address: tuple[str, int]) -> None:
        if self._writer is None:
            self._patience.say_who_is_missing(
                [f"{self._chief} at {host_port(*address)}"]
            )
        elif not self._joined.done():
            self._patience.say_who_is_missing(self._missing)

    def _look(self) -> None:
        operation, now = self.position.operation, time.monotonic()
        self._do(self._watchdog.look(operation, now))
        if operation is not None:
            self._patience.look(operation, self._watchdog.waited(operation, now))
        self._thread.loop.call_later(self._watchdog.interval, self._look)

    def _fail(self, message: str, details: str = "") -> None:
        self._do(self._watchdog.fail(message, details, time.monotonic()))

    def _do(self, actions: Actions) -> None:
        for action in actions:
            if isinstance(action, Fail):
                self._settle(action)
            else:
                self._send(encode(action.message))

    def _send(self, line: bytes) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(line)

    def _state(self, now: float) -> State:
        position = self.position
        count, last, operation = position.count, position.last, position.operation
        inside = None if operation is None else operation.name
        waited = 0.0 if operation is None else self._watchdog.waited(operation, now)
        stack = position.stack()
        entered = 0 if operation is None else operation.count
        way = position.agreements, *position.since(), {**position.notes}
        return State(count, last, inside, waited, *stack, entered, *way)

    def _settle(self, failure: Fail) -> None:
        """Takes a failure as final, and ends the process if that may be done."""
        text = failure.message
        operation, last = self.position.operation, self.position.last
        if operation is not None:
            text += f" [{self.name} was in `{operation.name}`]"
        elif last:
            text += f" [{self.name} was past `{last}`]"
        if failure.details:
            text += "\n" + failure.details.rstrip()
        self.failure = text
        self.failed.set()
        if not self._joined.done():
            kind = ClusterError if self._missing else WorkerFailedError
            self._joined.set_exception(kind(text))
        if self.ends_process:
            ending.exit_now(self._report(), PEER_FAILED)
        self._wake()

    def _report(self) -> str:
        return f"keras_strategy: {self.name} ends. {self.failure}"

    def _wake(self) -> None:
        for reply in list(self._replies.values()):
            reply.put(None)
