"""Client of the coordinator: a worker's control connection, with a watchdog on it.

`CoordinatorClient` exchanges small values with all workers and tracks the operations in
which they wait for each other. The connection belongs to a thread of its own, so a
failure is noticed whatever the main thread does.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import os
import queue
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn

from keras_strategy.cluster import (
    elastic,
    network,
    process_exit,
    rendezvous,
    transport,
    watchdog,
)
from keras_strategy.cluster.coordinator import Coordinator
from keras_strategy.cluster_resolver.cluster_spec import join_host_port
from keras_strategy.errors import (
    ClusterError,
    WorkerFailedError,
    WorkerInputError,
    WorkersDifferError,
)

# Time for the thread to end the process.
_EXIT_SECONDS = 10.0
# Time for the coordinator's failure to arrive when a backend raises. A lost connection
# may mean that a machine is down, which takes longer to detect.
_GRACE_SECONDS, _LOST_SECONDS = 1.0, 25.0
_LOST_CONNECTION = re.compile(
    r"connection (?:closed|reset|refused)|socket closed|broken pipe", re.IGNORECASE
)
# Every worker raises these by itself: one that has left has raised it, too.
_RAISED_BY_ALL = WorkerFailedError, WorkersDifferError, WorkerInputError
# Time for an elastic worker to get out of an operation after the workers have failed.
_ESCAPE_SECONDS = 5.0
_CHIEF_WRITES = (
    ". Only the chief writes files, such as those of `model.save`: to read one, other "
    "workers need a folder that all share"
)
# Longest parts of an exception that are sent to the others.
_MAX_MESSAGE, _MAX_TRACE = 2_000, 20_000


class CoordinatorClient(process_exit.ExitHandler):
    """A worker's client of the coordinator, which the chief (rank 0) runs."""

    # All workers make the same calls in the same order, each from one thread. When one
    # of them fails, all end: a process that is only a worker (`exit_process`) at any
    # moment, another by a `WorkerFailedError` of the next call. Clients without the
    # chief's `secret` are refused.

    def __init__(
        self,
        address: tuple[str, int],
        rank: int,
        names: Sequence[str],
        timeout_seconds: float | None = None,
        *,
        exit_process: bool = False,
        is_elastic: bool = False,
        secret: str | None = None,
        all_local: bool = False,
    ):
        """Join the cluster at `address`, and return when all workers have joined."""
        if timeout_seconds is None:
            timeout_seconds = rendezvous.default_timeout_seconds()
        if secret is None:
            secret = os.environ.get(rendezvous.SECRET_VARIABLE, "")
        self.rank, self.timeout_seconds = rank, timeout_seconds
        self._names, self._name, self._chief = list(names), names[rank], names[0]
        self.trace = watchdog.OperationTrace()
        self.notes = self.trace.notes
        # Why the workers cannot continue, once all know it.
        self.failure: str | None = None
        self.failed = threading.Event()
        self.left = False
        self._exit_process, self._is_elastic = exit_process, is_elastic
        # Whether the thread ends the process when the workers fail.
        self._thread_exits = False
        self._leave_callbacks: list[Callable[[], None]] = []
        # A queue for the reply to each request; None in it means that none will come.
        self._replies: dict[int, queue.SimpleQueue] = {}
        self._numbers = itertools.count()
        self._coordinator: Coordinator | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._rank_claim: socket.socket | None = None
        self._watchdog = watchdog.Watchdog(
            rank, self._names, timeout_seconds, time.monotonic(), self._send, self._fail
        )
        self._thread = transport.LoopThread("keras_strategy watchdog")
        self._missing = self._names
        # Resolved when no worker is missing any more.
        self._all_arrived = self._thread.loop.create_future()
        process_exit.register(self)
        try:
            if rank == 0:
                listeners = rendezvous.open_listeners(*address, all_local)
                self._coordinator = Coordinator(listeners, names, secret)
                # The chief may not reach itself by the name that others use.
                address = self._coordinator.address
            claim = {"rank": rank, "names": self._names}
            self._rank_claim = rendezvous.claim_rank(address, claim, secret)
            self._thread.run(
                self._connect(address, claim, secret), elastic.must_leave_cluster
            )
        except BaseException as error:
            self.leave()
            if isinstance(error, concurrent.futures.CancelledError):
                raise ClusterError(
                    "The workers changed before all had connected."
                ) from None
            raise
        self._thread_exits = exit_process and not is_elastic

    @property
    def host(self) -> str:
        """This machine's address in its connections to the other workers' machines."""
        writers = [self._writer]
        if self._coordinator is not None:
            writers = self._coordinator.writers_of_others()
        found = [str(w.get_extra_info("sockname")[0]) for w in writers if w is not None]
        hosts = [h.removeprefix("::ffff:").partition("%")[0] for h in found]
        return next((h for h in hosts if not network.is_loopback(h)), network.LOOPBACK)

    def on_leave(self, callback: Callable[[], None]) -> None:
        """Call `callback`, the last one first, before this worker disconnects."""
        self._leave_callbacks.append(callback)

    def exchange(
        self, operation: str, value: Any = None, seconds: float | None = None
    ) -> list[Any]:
        """Exchange a JSON value with all workers, and return the values by rank."""
        request = self._encode_request(operation, value)
        with self.track_operation(operation, seconds):
            return self._wait_for_reply(self._send_request(*request), operation)

    def start_exchange(
        self, operation: str, value: Any = None
    ) -> Callable[[], list[Any]]:
        """Start an exchange and return a function that waits for its result."""
        # It counts here: all workers make both kinds in the same order.
        reply = self._send_request(*self._encode_request(operation, value))

        def wait() -> list[Any]:
            with self.track_operation(operation):
                return self._wait_for_reply(reply, operation)

        return wait

    def _encode_request(self, operation: str, value: Any) -> tuple[int, str, bytes]:
        number = next(self._numbers)
        message = {"type": "exchange", "operation": operation, "value": value}
        name = f"`value` in {operation!r}"
        try:
            line = transport.encode({**message, "id": number})
        except (TypeError, ValueError) as error:
            raise TypeError(f"Expected {name} to be a value of JSON: {error}") from None
        if len(line) > transport.MAX_LINE:
            raise ValueError(
                f"Expected {name} to be at most {transport.MAX_LINE} bytes of JSON. "
                f"Received: {len(line)} bytes"
            )
        return number, operation, line

    def _send_request(self, number: int, operation: str, line: bytes) -> Any:
        self._replies[number] = reply = queue.SimpleQueue()
        # After the queue is registered: a failure from here on wakes its reader.
        self._check(operation)
        self._thread.call_soon(self._write, line)
        return reply

    def _wait_for_reply(self, reply: Any, operation: str) -> list[Any]:
        values = reply.get()
        if values is None:
            self._check(operation)
            raise AssertionError("woken without a reason")
        self.trace.record_exchange()
        return values

    def track_operation(
        self, operation: str, seconds: float | None = None
    ) -> TrackedOperation:
        """Context manager around what waits for all workers by other means."""
        # It sends nothing. All workers enter the same operations in the same order.
        return TrackedOperation(self, operation, seconds)

    def leave(self) -> None:
        """Disconnect; workers that wait for this one fail. Called at exit."""
        if self.left:
            return
        if self._leave_callbacks:
            # They may wait for workers that wait for this one.
            self._thread.call_soon(self._send, {"type": "leaving"})
        while self._leave_callbacks:
            self._leave_callbacks.pop()()
        process_exit.unregister(self)
        self.left = True
        self._thread.run(self._disconnect())
        self._thread.stop(watchdog.RELAY_SECONDS)
        if self._rank_claim is not None:
            self._rank_claim.close()
        self._wake()
        if self._coordinator is not None:
            self._coordinator.close()

    def replace_error(self, error: BaseException | None, operation: str) -> None:
        """Raise the workers' failure, if there is one, instead of its consequence."""
        if isinstance(error, _RAISED_BY_ALL) or self.left:
            return
        is_end = isinstance(error, StopIteration | StopAsyncIteration)
        failed = isinstance(error, Exception) and not is_end
        if failed and not self.failed.wait(_GRACE_SECONDS):
            trace = "".join(traceback.format_exception(error))[-_MAX_TRACE:]

            async def report() -> bool:
                now = time.monotonic()
                return self._watchdog.report_missing_workers(operation, trace, now)

            if self._thread.run(report()):
                self.failed.wait(watchdog.RELAY_SECONDS + 1)
            elif _LOST_CONNECTION.search(str(error)):
                self.failed.wait(_LOST_SECONDS)
        self._raise_recorded(error)

    def on_exception(self, error: BaseException, trace: str) -> None:
        """Report an exception that ends this process to the others."""
        text = f"{type(error).__name__}: {error}"[:_MAX_MESSAGE]
        first, *rest = text.split("\n", 1)
        message = f"{self._name} raised {first}"
        if self.trace.last:
            message += f" (in or after `{self.trace.last}`)"
        if isinstance(error, FileNotFoundError) and self.rank:
            message += _CHIEF_WRITES
            print(f"keras_strategy: {message}", file=sys.stderr, flush=True)
        message = "\n".join([message, *rest])

        async def report() -> None:
            self._thread_exits = False
            self._report(message, trace[-_MAX_TRACE:])

        self._thread.run(report())
        self.failed.wait(watchdog.RELAY_SECONDS)
        if self._exit_process:
            # Another failure may have come first, and even have caused this exception.
            if self.failure and not self.failure.startswith(message):
                self._exit()
            status = 1
            if isinstance(error, WorkerFailedError):
                status = process_exit.EXIT_OTHER_WORKER_FAILED
            elif isinstance(error, ClusterError):
                status = process_exit.EXIT_CLUSTER_NOT_FORMED
            elif isinstance(error, KeyboardInterrupt):
                status = process_exit.EXIT_INTERRUPTED
            process_exit.exit_now("", status)

    def on_fork(self) -> None:
        self.left = True
        transport.detach(*filter(None, (self._writer, self._rank_claim)))
        if self._coordinator is not None:
            self._coordinator.detach()

    def _check(self, operation: str) -> None:
        """Raise the error that keeps this worker from continuing, if there is one."""
        self._raise_recorded(None)
        if self.left:
            raise RuntimeError("This worker has left its cluster.")
        if self._watchdog.disconnected:
            raise WorkerFailedError(
                f"{self._chief} ended while {self._name} was waiting for it in "
                f"`{operation}`"
            )

    def _raise_recorded(self, cause: BaseException | None) -> None:
        if self.failure is not None:
            if self._thread_exits:
                self._thread.join(_EXIT_SECONDS)
            raise WorkerFailedError(self.failure) from cause

    # The following methods run in the thread.

    async def _connect(
        self, address: tuple[str, int], claim: dict[str, Any], secret: str
    ) -> None:
        timeout = self.timeout_seconds
        deadline = time.monotonic() + timeout
        loop = self._thread.loop
        loop.call_later(watchdog.SLOW_OPERATION_SECONDS, self._warn_missing, address)
        reader, self._writer = await rendezvous.connect(address, claim, secret, timeout)
        self._receiving = asyncio.create_task(self._receive(reader))
        self._check_regularly()
        await asyncio.wait([self._all_arrived], timeout=deadline - time.monotonic())
        if not self._all_arrived.done():
            verb = "has" if len(self._missing) == 1 else "have"
            late = f"{verb} not arrived within {timeout:g} s"
            self._report(f"{' and '.join(self._missing)} {late}")
        await self._all_arrived

    async def _disconnect(self) -> None:
        self._watchdog.leaving = True
        if self._writer is not None:
            # The coordinator answers by closing the connection.
            self._send({"type": "bye"})
            await asyncio.wait([self._receiving], timeout=watchdog.RELAY_SECONDS)
            self._writer.transport.abort()

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        why = await transport.handle_messages(reader, self._handle)
        if self._writer is not None and not reader.at_eof():
            # The coordinator still runs, and the other workers do not know.
            message = f"{self._chief} {why}"
            self._send({"type": "failed", "message": message, "details": ""})
        self._watchdog.on_disconnect(why)
        self._wake()

    def _handle(self, message: dict[str, Any]) -> None:
        now = time.monotonic()
        self._watchdog.on_message(message, now)
        kind = message["type"]
        if kind == "reply":
            # It has equal values once.
            indices = message.get("indices", [0] * len(self._names))
            values = [message["values"][n] for n in indices]
            self._replies.pop(message["id"]).put(values)
        elif kind == "arrived":
            self._missing = message["missing"]
            if not self._missing and not self._all_arrived.done():
                self._all_arrived.set_result(None)
        elif kind == "report":
            state = self.trace.state(self._watchdog, now)._asdict()
            self._send({"type": "state", "report": message["report"], "state": state})

    def _warn_missing(self, address: tuple[str, int]) -> None:
        if self._writer is None:
            where = join_host_port(*address)
            self._watchdog.warn_missing([f"{self._chief} at {where}"])
        elif not self._all_arrived.done():
            self._watchdog.warn_missing(self._missing)

    def _check_regularly(self) -> None:
        operation, now = self.trace.operation, time.monotonic()
        self._watchdog.check(operation, now)
        if operation is not None:
            self._watchdog.warn_if_slow(operation, now)
        self._thread.loop.call_later(self._watchdog.interval, self._check_regularly)

    def _report(self, message: str, details: str = "") -> None:
        self._watchdog.report_failure(message, details, time.monotonic())

    def _send(self, message: dict[str, Any]) -> None:
        self._write(transport.encode(message))

    def _write(self, line: bytes) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(line)

    def _fail(self, text: str, details: str) -> None:
        """Record the final failure, and end the process if that is allowed."""
        operation, last = self.trace.operation, self.trace.last
        if operation is not None:
            text += f" [{self._name} was in `{operation.name}`]"
        elif last:
            text += f" [{self._name} was past `{last}`]"
        if details:
            text += "\n" + details.rstrip()
        self.failure = text
        self.failed.set()
        if not self._all_arrived.done():
            kind = ClusterError if self._missing else WorkerFailedError
            self._all_arrived.set_exception(kind(text))
        if self._thread_exits:
            self._exit()
        if self._is_elastic:
            self._exit_if_stuck(None)
        self._wake()

    def _exit_if_stuck(self, operation: watchdog.Operation | None) -> None:
        """Exit if the main thread does not get out of an operation."""
        current = self.trace.operation
        if current is not None and current is operation:
            self._exit()
        later = _ESCAPE_SECONDS, self._exit_if_stuck, current
        self._thread.loop.call_later(*later)

    def _exit(self) -> NoReturn:
        text = f"keras_strategy: {self._name} ends. {self.failure}"
        process_exit.exit_now(text, process_exit.EXIT_OTHER_WORKER_FAILED)

    def _wake(self) -> None:
        for reply in list(self._replies.values()):
            reply.put(None)


class TrackedOperation:
    __slots__ = ("_client", "_operation", "_outer", "_seconds")

    def __init__(
        self, client: CoordinatorClient, operation: str, seconds: float | None
    ):
        self._client, self._operation, self._seconds = client, operation, seconds

    def __enter__(self) -> None:
        self._outer = self._client.trace.enter(self._operation, self._seconds)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        client = self._client
        try:
            if error is not None or client.failure is not None:
                client.replace_error(error, self._operation)
        finally:
            client.trace.operation = self._outer
