"""Client API: exchange values with all workers, and track collective operations."""

from __future__ import annotations

import contextlib
import itertools
import os
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from keras_strategy.errors import (
    WorkerFailedError,
    WorkerInputError,
    WorkersDifferError,
)
from keras_strategy.workers import ending
from keras_strategy.workers.connection import Connection
from keras_strategy.workers.exit_codes import EXIT_INTERRUPTED, EXIT_OTHER_WORKER_FAILED
from keras_strategy.workers.hub import Coordinator
from keras_strategy.workers.meeting import open_listeners
from keras_strategy.workers.settings import (
    SECRET_VARIABLE,
    default_timeout_seconds,
    positive_seconds,
)
from keras_strategy.workers.wire import MAX_LINE, encode

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
                coordinator = Coordinator(open_listeners(*address, all_local), names, secret)
                on_error.callback(coordinator.close)
                # The chief may not reach itself by the name that others use.
                address = coordinator.address
            connection = Connection(rank, names, timeout_seconds)
            on_error.callback(connection.leave)
            connection.join(address, {"rank": rank, "names": names}, secret)
            on_error.pop_all()
        member = cls(connection, coordinator, rank, timeout_seconds, exit_process)
        connection.exits_process = exit_process
        ending.register(member)
        return member

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
            TypeError: If `value` is not a JSON value.
            ValueError: If it is too large.
        """
        request = self._encode_request(operation, value)
        with self.track_operation(operation, seconds):
            reply = self._connection.request(*request)
            values = self._connection.wait_for_reply(reply)
            self._trace.record_exchange()
        return values

    def start_exchange(self, operation: str, value: Any = None) -> Callable[[], list[Any]]:
        """Start an `agree` call and return a function that waits for its result.

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

    def track_operation(self, operation: str, seconds: float | None = None) -> TrackedOperation:
        """Context manager around what waits for all workers by other means.

        It sends nothing; the watchdog checks it. All workers enter the same operations
        in the same order.

        Args:
            operation: Its name in messages.
            seconds: Its time limit. Defaults to `timeout_seconds`.
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
        ending.unregister(self)
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
            ending.exit_now(other, EXIT_OTHER_WORKER_FAILED if is_other else status)

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

    __slots__ = ("_member", "_operation", "_outer", "_seconds", "_trace")

    def __init__(self, member: CoordinatorClient, operation: str, seconds: float | None):
        self._member, self._operation, self._seconds = member, operation, seconds
        self._trace = member._trace

    def __enter__(self) -> None:
        self._outer = self._trace.enter(self._operation, self._seconds)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is not None or self._member._connection.failure is not None:
                self._member._raise_failure(error, self._operation)
        finally:
            self._trace.operation = self._outer
