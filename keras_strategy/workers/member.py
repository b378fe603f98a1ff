"""`Member`: one worker's part in its cluster."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from keras_strategy.errors import WorkerFailedError
from keras_strategy.workers import ending
from keras_strategy.workers.connection import Connection
from keras_strategy.workers.hub import Hub
from keras_strategy.workers.meeting import listen
from keras_strategy.workers.settings import (
    RUN_VARIABLE,
    default_timeout_seconds,
    positive_seconds,
)
from keras_strategy.workers.wire import MAX_LINE, PROTOCOL, encode

# The engine's own error about a worker that is gone comes with the hub's, or before.
_GRACE_SECONDS = 1.0
# What is told of an exception.
_LONGEST_MESSAGE, _LONGEST_TRACE = 2_000, 20_000


class Member:
    """One worker's part in its cluster. Made by `join`.

    The workers make the same calls in the same order, each from one thread. When
    one of them fails, all end: see `join`.

    Attributes:
        rank: Which of the workers this is.
        timeout_seconds: How long a worker waits for the others.
    """

    def __init__(
        self,
        connection: Connection,
        hub: Hub | None,
        rank: int,
        timeout_seconds: float,
        exit_process: bool,
    ):
        self.rank, self.timeout_seconds = rank, timeout_seconds
        self._connection, self._hub = connection, hub
        self._position = connection.position
        self._exit_process = exit_process
        self._at_leave: list[Callable[[], None]] = []
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
        run_id: str | None = None,
    ) -> Member:
        """Meets the other workers, and returns when all are there.

        Args:
            address: Where they meet; see `hub_address`.
            rank: Which of them this process is. Rank 0 is the chief, to which the
                others connect.
            names: What messages call them, by rank.
            timeout_seconds: How long to wait for the others, here and in every
                operation. Defaults to `default_timeout_seconds()`.
            exit_process: Whether this process is a worker and nothing else, so that
                it may be ended at any moment, with status 1, when another one
                fails or when it raises. Without it, the failure is raised as a
                `WorkerFailedError` by the next thing that this member does.
            run_id: A text that the workers of one run share. Who has another one is
                refused. Defaults to the environment variable
                KERAS_STRATEGY_RUN_ID.

        Returns:
            The member.

        Raises:
            ClusterError: If they do not come together.
            WorkerFailedError: If they do, and one fails at once.
            OSError: If the chief cannot open the port.
            ValueError: If an argument is not what it must be.
        """
        names = [str(name) for name in names]
        if not 0 <= rank < len(names):
            raise ValueError(
                f"Expected `rank` to be from 0 to {len(names) - 1}. Received: {rank!r}"
            )
        if timeout_seconds is None:
            timeout_seconds = default_timeout_seconds()
        timeout_seconds = positive_seconds(timeout_seconds, "`timeout_seconds`")
        if run_id is None:
            run_id = os.environ.get(RUN_VARIABLE, "")
        hello = {"type": "hello", "protocol": PROTOCOL, "run": run_id}
        hello |= {"rank": rank, "names": names}
        hub = None
        with contextlib.ExitStack() as on_error:
            if rank == 0:
                hub = Hub(listen(*address), names, run_id)
                on_error.callback(hub.close)
                # It need not be able to reach itself by the name it has for others.
                address = hub.address
            connection = Connection(rank, names, timeout_seconds)
            on_error.callback(connection.leave)
            connection.join(address, hello)
            on_error.pop_all()
        member = cls(connection, hub, rank, timeout_seconds, exit_process)
        connection.ends_process = exit_process
        ending.register(member)
        return member

    def at_leave(self, callback: Callable[[], None]) -> None:
        """Has something done when this worker leaves, while the others are known.

        Args:
            callback: Called without arguments; those given later come first.
        """
        self._at_leave.append(callback)

    def agree(self, operation: str, value: Any = None) -> list[Any]:
        """Exchanges a value with all workers, and waits for them.

        Args:
            operation: What this worker is doing; all must do the same.
            value: What JSON can say. A tuple comes back as a list.

        Returns:
            The values of all workers, by rank.

        Raises:
            WorkerFailedError: If a worker fails, or is in another operation.
            TypeError: If `value` is not one of JSON's.
            ValueError: If it is too large.
        """
        request = self._request(operation, value)
        with self.waiting(operation):
            return self._connection.ask(*request)

    def waiting(self, operation: str) -> Waiting:
        """Surrounds what waits for all other workers by other means.

        It sends nothing; the watchdog looks at it. All workers must enter the same
        operations in the same order.

        Args:
            operation: What messages call it.

        Returns:
            A context manager.
        """
        return Waiting(self, operation)

    def leave(self) -> None:
        """Says goodbye and closes the connection; on the chief, the hub as well.

        It is called when the interpreter exits. Others that wait for this worker
        afterwards, or get to do so, fail.
        """
        if self._connection.left:
            return
        while self._at_leave:
            self._at_leave.pop()()
        ending.unregister(self)
        self._connection.leave()
        if self._hub is not None:
            self._hub.close()

    def raised(self, error: BaseException, trace: str) -> None:
        """Tells the others of an exception that ends this process."""
        what = f"{type(error).__name__}: {error}"[:_LONGEST_MESSAGE]
        message = f"{self._connection.name} raised {what}"
        if self._position.last:
            message += f" (in or after `{self._position.last}`)"
        # Another failure may have come first, and perhaps this exception of it.
        other = self._connection.fail(message, trace[-_LONGEST_TRACE:])
        if self._exit_process:
            ending.exit_now(other)

    def forget(self) -> None:
        """Closes, in a forked child, its copies of what belongs to the parent."""
        self._connection.forget()
        if self._hub is not None:
            self._hub.forget()

    def _request(self, operation: str, value: Any) -> tuple[int, bytes]:
        number = next(self._numbers)
        message = {"type": "agree", "operation": operation, "value": value}
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
        return number, line

    def _after(self, error: BaseException | None) -> None:
        """Raises the failure, if there is one, rather than what came of it."""
        connection = self._connection
        if isinstance(error, WorkerFailedError) or connection.left:
            return
        if isinstance(error, Exception) and not isinstance(
            error, StopIteration | StopAsyncIteration
        ):
            connection.failed.wait(_GRACE_SECONDS)
        if connection.failure is not None:
            connection.stop_here()
            raise WorkerFailedError(connection.failure) from error


class Waiting:
    """Marks that its member waits for all other workers; see `Member.waiting`."""

    __slots__ = ("_member", "_operation", "_outer", "_position")

    def __init__(self, member: Member, operation: str):
        self._member, self._operation = member, operation
        self._position = member._position

    def __enter__(self) -> None:
        self._outer = self._position.enter(self._operation)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is not None or self._member._connection.failure is not None:
                self._member._after(error)
        finally:
            self._position.operation = self._outer
