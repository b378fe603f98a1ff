"""Client of the coordinator: a worker's control connection, with a watchdog on it.

`CoordinatorClient` exchanges small values with all workers and tracks the operations in
which they wait for each other. `Connection` does the rest in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from keras_strategy.cluster import process_exit, watchdog
from keras_strategy.cluster.coordinator import Coordinator
from keras_strategy.cluster.failure_diagnosis import OperationTrace, WorkerState
from keras_strategy.cluster.process_exit import (
    EXIT_INTERRUPTED,
    EXIT_OTHER_WORKER_FAILED,
)
from keras_strategy.cluster.rendezvous import (
    SECRET_VARIABLE,
    claim_rank,
    connect,
    default_timeout_seconds,
    host_port,
    open_listeners,
    positive_seconds,
)
from keras_strategy.cluster.transport import (
    MAX_LINE,
    LoopThread,
    detach,
    encode,
    handle_messages,
)
from keras_strategy.cluster.watchdog import (
    RELAY_SECONDS,
    Actions,
    Fail,
    SlowOperationWarnings,
    Watchdog,
)
from keras_strategy.errors import (
    ClusterError,
    WorkerFailedError,
    WorkerInputError,
    WorkersDifferError,
)

# Time for the thread to end the process.
_EXIT_SECONDS = 10.0


class Connection:
    """A worker's connection to the coordinator, with a watchdog on it.

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
        """Connect to the coordinator, and wait until all workers have."""
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
        loop.call_later(watchdog.SLOW_OPERATION_SECONDS, self._warn_missing, address)
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
            process_exit.exit_now(self._exit_text(), EXIT_OTHER_WORKER_FAILED)
        self._wake()

    def _exit_text(self) -> str:
        return f"keras_strategy: {self.name} ends. {self.failure}"

    def _wake(self) -> None:
        for reply in list(self._replies.values()):
            reply.put(None)


# Time for the coordinator's failure to arrive when a backend reports a lost worker.
_GRACE_SECONDS = 1.0
# Every worker raises these by itself: one that has left has raised it, too.
_RAISED_BY_ALL = WorkerFailedError, WorkersDifferError, WorkerInputError
# Longest parts of an exception that are sent to the others.
_MAX_MESSAGE, _MAX_TRACE = 2_000, 20_000


class CoordinatorClient:
    """A worker's client of the coordinator. Made by `join`.

    All workers make the same calls in the same order, each from one thread. When one of
    them fails, all end: see `join`.

    Attributes:
        rank: This worker's rank.
        timeout_seconds: How long a worker waits for the others.
        notes: What the error for a deadlock compares between workers, by topic.
    """

    def __init__(
        self,
        connection: Connection,
        coordinator: Coordinator | None,
        rank: int,
        timeout_seconds: float,
        exit_process: bool,
    ):
        self.rank, self.timeout_seconds = rank, timeout_seconds
        self._connection, self._coordinator = connection, coordinator
        self._trace = connection.trace
        self.notes = self._trace.notes
        self._exit_process = exit_process
        self._leave_callbacks: list[Callable[[], None]] = []
        self._numbers = itertools.count()

    @classmethod
    def join(
        cls,
        address: tuple[str, int],
        rank: int,
        names: Sequence[str],
        timeout_seconds: float | None = None,
        *,
        exit_process: bool = False,
        secret: str | None = None,
        all_local: bool = False,
    ) -> CoordinatorClient:
        """Join the cluster, and return when all workers have joined.

        Args:
            address: The rendezvous address; see `rendezvous_address`.
            rank: This worker's rank. Rank 0 is the chief, which runs the coordinator.
            names: The workers' names in messages, by rank.
            timeout_seconds: How long to wait for the others, here and in every
                operation. Defaults to `default_timeout_seconds()`.
            exit_process: Whether this process is only a worker, so that it may be ended
                at any moment, when another worker fails or when it raises; `exit_codes`
                lists the statuses. Otherwise the failure is raised as a
                `WorkerFailedError` by the next call of this client.
            secret: A text that the workers of one run share; clients without it are
                refused. Defaults to the environment variable KERAS_STRATEGY_SECRET.
            all_local: Whether all workers are on this machine.

        Raises:
            ClusterError: If the cluster is not formed.
            WorkerFailedError: If it is, and a worker fails at once.
            OSError: If the chief cannot open the port.
            ValueError: If an argument is invalid.
        """
        names = [str(name) for name in names]
        if not 0 <= rank < len(names):
            raise ValueError(
                f"Expected `rank` to be from 0 to {len(names) - 1}. Received: {rank!r}"
            )
        if timeout_seconds is None:
            timeout_seconds = default_timeout_seconds()
        timeout_seconds = positive_seconds(timeout_seconds, "`timeout_seconds`")
        if secret is None:
            secret = os.environ.get(SECRET_VARIABLE, "")
        coordinator = None
        with contextlib.ExitStack() as on_error:
            if rank == 0:
                coordinator = Coordinator(
                    open_listeners(*address, all_local), names, secret
                )
                on_error.callback(coordinator.close)
                # The chief may not reach itself by the name that others use.
                address = coordinator.address
            connection = Connection(rank, names, timeout_seconds)
            on_error.callback(connection.leave)
            connection.join(address, {"rank": rank, "names": names}, secret)
            on_error.pop_all()
        client = cls(connection, coordinator, rank, timeout_seconds, exit_process)
        connection.exits_process = exit_process
        process_exit.register(client)
        return client

    def on_leave(self, callback: Callable[[], None]) -> None:
        """Call `callback` when this worker leaves, while it is still connected.

        The callback that is added last is called first.
        """
        self._leave_callbacks.append(callback)

    def exchange(
        self, operation: str, value: Any = None, seconds: float | None = None
    ) -> list[Any]:
        """Exchange a value with all workers, and return the values by rank.

        Args:
            operation: The same name on all workers.
            value: A JSON value. A tuple comes back as a list.
            seconds: Time limit. Defaults to `timeout_seconds`.

        Raises:
            WorkerFailedError: If a worker fails, or is in another operation.
        """
        request = self._encode_request(operation, value)
        with self.track_operation(operation, seconds):
            reply = self._connection.request(*request)
            values = self._connection.wait_for_reply(reply)
            self._trace.record_exchange()
        return values

    def start_exchange(
        self, operation: str, value: Any = None
    ) -> Callable[[], list[Any]]:
        """Start an exchange and return a function that waits for its result.

        The call counts here: all workers make both kinds in the same order. The
        returned function need not be called.
        """
        reply = self._connection.request(*self._encode_request(operation, value))

        def wait() -> list[Any]:
            with self.track_operation(operation):
                values = self._connection.wait_for_reply(reply)
                self._trace.record_exchange()
            return values

        return wait

    def track_operation(
        self, operation: str, seconds: float | None = None
    ) -> TrackedOperation:
        """Context manager around what waits for all workers by other means.

        It sends nothing; the watchdog checks it. All workers enter the same operations
        in the same order. The time limit `seconds` defaults to `timeout_seconds`.
        """
        return TrackedOperation(self, operation, seconds)

    def leave(self) -> None:
        """Disconnect in an orderly way; on the chief, close the coordinator as well.

        It is called when the interpreter exits. Workers that wait for this one fail.
        """
        if self._connection.left:
            return
        if self._leave_callbacks:
            # They may wait for workers that wait for this one.
            self._connection.announce_leaving()
        while self._leave_callbacks:
            self._leave_callbacks.pop()()
        process_exit.unregister(self)
        self._connection.leave()
        if self._coordinator is not None:
            self._coordinator.close()

    def on_exception(self, error: BaseException, trace: str) -> None:
        """Report an exception that ends this process to the others."""
        text = f"{type(error).__name__}: {error}"[:_MAX_MESSAGE]
        first, *rest = text.split("\n", 1)
        message = f"{self._connection.name} raised {first}"
        if self._trace.last:
            message += f" (in or after `{self._trace.last}`)"
        message = "\n".join([message, *rest])
        # Another failure may have come first, and even have caused this exception.
        other = self._connection.report_failure(message, trace[-_MAX_TRACE:])
        if self._exit_process:
            status = EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
            is_other = other or isinstance(error, WorkerFailedError)
            process_exit.exit_now(
                other, EXIT_OTHER_WORKER_FAILED if is_other else status
            )

    def on_fork(self) -> None:
        """Close a forked child's copies of the parent's sockets."""
        self._connection.detach()
        if self._coordinator is not None:
            self._coordinator.detach()

    def _encode_request(self, operation: str, value: Any) -> tuple[int, bytes, str]:
        number = next(self._numbers)
        message = {"type": "exchange", "operation": operation, "value": value}
        name = f"`value` in {operation!r}"
        try:
            line = encode({**message, "id": number})
        except (TypeError, ValueError) as error:
            raise TypeError(f"Expected {name} to be a value of JSON: {error}") from None
        if len(line) > MAX_LINE:
            raise ValueError(
                f"Expected {name} to be at most {MAX_LINE} bytes of JSON. Received: "
                f"{len(line)} bytes"
            )
        return number, line, operation

    def _raise_failure(self, error: BaseException | None, operation: str) -> None:
        """Raise the workers' failure, if there is one, instead of its consequence."""
        connection = self._connection
        if isinstance(error, _RAISED_BY_ALL) or connection.left:
            return
        is_end = isinstance(error, StopIteration | StopAsyncIteration)
        failed = isinstance(error, Exception) and not is_end
        if failed and not connection.failed.wait(_GRACE_SECONDS):
            trace = "".join(traceback.format_exception(error))
            connection.report_missing_workers(operation, trace[-_MAX_TRACE:])
        if connection.failure is not None:
            connection.wait_for_exit()
            raise WorkerFailedError(connection.failure) from error


class TrackedOperation:
    """Context manager that records that a worker waits for the others."""

    __slots__ = ("_client", "_operation", "_outer", "_seconds", "_trace")

    def __init__(
        self, client: CoordinatorClient, operation: str, seconds: float | None
    ):
        self._client, self._operation, self._seconds = client, operation, seconds
        self._trace = client._trace

    def __enter__(self) -> None:
        self._outer = self._trace.enter(self._operation, self._seconds)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is not None or self._client._connection.failure is not None:
                self._client._raise_failure(error, self._operation)
        finally:
            self._trace.operation = self._outer
