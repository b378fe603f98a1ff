"""Client of the coordinator: a worker's control connection, in a thread of its own."""

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
from keras_strategy.workers.exit_codes import EXIT_OTHER_WORKER_FAILED
from keras_strategy.workers.loop import LoopThread
from keras_strategy.workers.meeting import claim_rank, connect
from keras_strategy.workers.patience import SlowOperationWarnings
from keras_strategy.workers.position import OperationTrace
from keras_strategy.workers.settings import host_port
from keras_strategy.workers.verdict import WorkerState
from keras_strategy.workers.watchdog import RELAY_SECONDS, Actions, Fail, Watchdog
from keras_strategy.workers.wire import detach, encode, handle_messages

# Time for the thread to end the process.
_EXIT_SECONDS = 10.0


class Connection:
    """A worker's connection to the coordinator, with a watchdog on it.

    Args:
        rank: This worker's rank.
        names: The workers' names in messages, by rank.
        timeout_seconds: How long to wait for the other workers.

    Attributes:
        name: This worker's name in messages.
        trace: This worker's operation trace.
        failure: Why the workers cannot continue, once all know it.
        failed: Event that is set then.
        left: Whether this worker has left.
        exits_process: Whether the thread ends the process when the workers fail.
    """

    def __init__(self, rank: int, names: list[str], timeout_seconds: float):
        self.name, self._chief = names[rank], names[0]
        self._size = len(names)
        self._timeout = timeout_seconds
        self.trace = OperationTrace()
        self.failure: str | None = None
        self.failed = threading.Event()
        self.left = False
        self.exits_process = False
        self._disconnected = False
        # A queue for the reply to each request; None in it means that none will come.
        self._replies: dict[int, queue.SimpleQueue] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._rank_claim: socket.socket | None = None
        self._watchdog = Watchdog(rank, names, timeout_seconds, time.monotonic())
        self._warnings = SlowOperationWarnings(names[rank], timeout_seconds)
        self._thread = LoopThread("keras_strategy watchdog")
        self._missing = names
        # Resolved when no worker is missing any more.
        self._all_arrived = self._thread.loop.create_future()

    def join(
        self, address: tuple[str, int], claim: dict[str, Any], secret: str
    ) -> None:
        """Connect to the coordinator, and wait until all workers have.

        Raises:
            ClusterError: If the cluster is not formed.
            WorkerFailedError: If it is, and a worker fails at once.
        """
        self._rank_claim = claim_rank(address, claim, secret)
        self._thread.run(self._join(address, claim, secret))

    def announce_leaving(self) -> None:
        """Tell the others that they must not wait for this worker any more."""
        self._thread.call_soon(self._send, encode({"type": "leaving"}))

    def leave(self) -> None:
        """Disconnect in an orderly way, and stop the thread."""
        self.left = True
        self._thread.run(self._leave())
        self._thread.stop(RELAY_SECONDS)
        if self._rank_claim is not None:
            self._rank_claim.close()
        self._wake()

    def detach(self) -> None:
        """Close a forked child's copy of the connection."""
        self.left = True
        detach(*filter(None, (self._writer, self._rank_claim)))

    def request(self, number: int, line: bytes, operation: str) -> queue.SimpleQueue:
        """Send a request; `wait_for_reply` takes the returned queue."""
        self._replies[number] = reply = queue.SimpleQueue()
        # After the queue is registered: a failure from here on wakes its reader.
        self.check(operation)
        self._thread.call_soon(self._send, line)
        return reply

    def wait_for_reply(self, reply: queue.SimpleQueue) -> list[Any]:
        """Return the values of all workers when they have arrived."""
        values = reply.get()
        if values is None:
            self.check()
            raise AssertionError("woken without a reason")
        return values

    def check(self, operation: str = "") -> None:
        """Raise the error that keeps this worker from continuing, if there is one."""
        if self.failure is not None:
            self.wait_for_exit()
            raise WorkerFailedError(self.failure)
        if self.left:
            raise RuntimeError("This worker has left its cluster.")
        if self._disconnected:
            operation = operation or self.trace.last
            raise WorkerFailedError(
                f"{self._chief} ended while {self.name} was waiting for it in "
                f"`{operation}`"
            )

    def wait_for_exit(self) -> None:
        """Wait for the thread to end the process, if it does so after a failure."""
        if self.exits_process:
            self._thread.join(_EXIT_SECONDS)

    def report_failure(self, message: str, details: str) -> str:
        """Report to all workers that this one cannot continue.

        From now on the thread does not end the process, unless it already does so.

        Returns:
            What to print about another failure that came first; empty if none did.
        """
        self._thread.run(self._report_failure(message, details))
        self.failed.wait(RELAY_SECONDS)
        is_other = self.failure and not self.failure.startswith(message)
        return self._exit_text() if is_other else ""

    def report_missing_workers(self, operation: str, details: str) -> None:
        """Report that an operation failed because workers have left, if any have."""

        async def report() -> bool:
            now = time.monotonic()
            actions = self._watchdog.report_missing_workers(operation, details, now)
            self._perform(actions)
            return bool(actions)

        if self._thread.run(report()):
            self.failed.wait(RELAY_SECONDS + 1)

    # The following methods run in the thread.

    async def _join(
        self, address: tuple[str, int], claim: dict[str, Any], secret: str
    ) -> None:
        deadline = time.monotonic() + self._timeout
        loop = self._thread.loop
        loop.call_later(patience.SLOW_OPERATION_SECONDS, self._warn_missing, address)
        reader, self._writer = await connect(address, claim, secret, self._timeout)
        self._receiving = asyncio.create_task(self._receive(reader))
        self._check_regularly()
        await asyncio.wait([self._all_arrived], timeout=deadline - time.monotonic())
        if not self._all_arrived.done():
            verb = "has" if len(self._missing) == 1 else "have"
            late = f"{verb} not arrived within {self._timeout:g} s"
            self._report(f"{' and '.join(self._missing)} {late}")
        await self._all_arrived

    async def _leave(self) -> None:
        self._watchdog.leave()
        if self._writer is not None:
            # The coordinator answers by closing the connection.
            self._send(encode({"type": "bye"}))
            await asyncio.wait([self._receiving], timeout=RELAY_SECONDS)
            self._writer.transport.abort()

    async def _report_failure(self, message: str, details: str) -> None:
        self.exits_process = False
        self._report(message, details)

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        why = await handle_messages(reader, self._handle)
        if self._writer is not None and not reader.at_eof():
            # The coordinator still runs, and the other workers do not know.
            message = f"{self._chief} {why}"
            self._send(encode({"type": "failed", "message": message, "details": ""}))
        self._disconnected = True
        self._perform(self._watchdog.on_disconnect(why))
        self._wake()

    def _handle(self, message: dict[str, Any]) -> None:
        now = time.monotonic()
        self._perform(self._watchdog.on_message(message, now))
        kind = message["type"]
        if kind == "reply":
            self._replies.pop(message["id"]).put(self._values(message))
        elif kind == "arrived":
            self._missing = message["missing"]
            if not self._missing and not self._all_arrived.done():
                self._all_arrived.set_result(None)
        elif kind == "report":
            state = dataclasses.asdict(self._state(now))
            answer = {"type": "state", "report": message["report"], "state": state}
            self._send(encode(answer))

    def _values(self, reply: dict[str, Any]) -> list[Any]:
        """Return the values by rank; the reply has equal ones once."""
        values = reply["values"]
        return [values[n] for n in reply.get("indices", [0] * self._size)]

    def _warn_missing(self, address: tuple[str, int]) -> None:
        if self._writer is None:
            self._warnings.warn_missing([f"{self._chief} at {host_port(*address)}"])
        elif not self._all_arrived.done():
            self._warnings.warn_missing(self._missing)

    def _check_regularly(self) -> None:
        operation, now = self.trace.operation, time.monotonic()
        self._perform(self._watchdog.check(operation, now))
        if operation is not None:
            self._warnings.check(operation, self._watchdog.waited(operation, now))
        self._thread.loop.call_later(self._watchdog.interval, self._check_regularly)

    def _report(self, message: str, details: str = "") -> None:
        now = time.monotonic()
        self._perform(self._watchdog.report_failure(message, details, now))

    def _perform(self, actions: Actions) -> None:
        for action in actions:
            if isinstance(action, Fail):
                self._fail(action)
            else:
                self._send(encode(action.message))

    def _send(self, line: bytes) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(line)

    def _state(self, now: float) -> WorkerState:
        trace = self.trace
        # The main thread changes the trace meanwhile: read each attribute once.
        count, last, operation = trace.count, trace.last, trace.operation
        inside = None if operation is None else operation.name
        waited = 0.0 if operation is None else self._watchdog.waited(operation, now)
        stack = trace.stack()
        entered = 0 if operation is None else operation.count
        history = trace.exchanges, *trace.since_exchange(), {**trace.notes}
        return WorkerState(count, last, inside, waited, *stack, entered, *history)

    def _fail(self, failure: Fail) -> None:
        """Record the final failure, and end the process if that is allowed."""
        text = failure.message
        operation, last = self.trace.operation, self.trace.last
        if operation is not None:
            text += f" [{self.name} was in `{operation.name}`]"
        elif last:
            text += f" [{self.name} was past `{last}`]"
        if failure.details:
            text += "\n" + failure.details.rstrip()
        self.failure = text
        self.failed.set()
        if not self._all_arrived.done():
            kind = ClusterError if self._missing else WorkerFailedError
            self._all_arrived.set_exception(kind(text))
        if self.exits_process:
            ending.exit_now(self._exit_text(), EXIT_OTHER_WORKER_FAILED)
        self._wake()

    def _exit_text(self) -> str:
        return f"keras_strategy: {self.name} ends. {self.failure}"

    def _wake(self) -> None:
        for reply in list(self._replies.values()):
            reply.put(None)
