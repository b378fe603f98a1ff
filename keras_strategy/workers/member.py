"""`Member`: one worker's part in its cluster."""

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
from keras_strategy.workers.exit_codes import INTERRUPTED, PEER_FAILED
from keras_strategy.workers.hub import Hub
from keras_strategy.workers.meeting import listen
from keras_strategy.workers.settings import (
    SECRET_VARIABLE,
    default_timeout_seconds,
    positive_seconds,
)
from keras_strategy.workers.wire import MAX_LINE, encode

# The engine's own error about a worker that is gone comes with the hub's, or before.
_GRACE_SECONDS = 1.0
# Every worker raises these: one that has left by now has raised it, too.
_KNOWN_TO_ALL = WorkerFailedError, WorkersDifferError, WorkerInputError
# What is told of an exception.
_LONGEST_MESSAGE, _LONGEST_TRACE = 2_000, 20_000


class Member:
    """One worker's part in its cluster. Made by `join`.

    The workers make the same calls in the same order, each from one thread. When
    one of them fails, all end: see `join`.

    Attributes:
        rank: Which of the workers this is.
        timeout_seconds: How long a worker waits for the others.
        notes: What messages tell of this worker where the workers wait for each
            other in different operations: words, by what they are about.
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
        self.notes = self._position.notes
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
        secret: str | None = None,
        all_here: bool = False,
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
                it may be ended at any moment, when another one fails or when it
                raises; `exit_codes` says with which status. Without it, the failure
                is raised as a `WorkerFailedError` by the next thing that this member
                does.
            secret: A text that the workers of one run share. Who does not know it
                is refused. Defaults to the environment variable
                KERAS_STRATEGY_SECRET.
            all_here: Whether all workers are on this machine.

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
        if secret is None:
            secret = os.environ.get(SECRET_VARIABLE, "")
        hub = None
        with contextlib.ExitStack() as on_error:
            if rank == 0:
                hub = Hub(listen(*address, all_here), names, secret)
                on_error.callback(hub.close)
                # It need not be able to reach itself by the name it has for others.
                address = hub.address
            connection = Connection(rank, names, timeout_seconds)
            on_error.callback(connection.leave)
            connection.join(address, {"rank": rank, "names": names}, secret)
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

    def agree(
        self, operation: str, value: Any = None, seconds: float | None = None
    ) -> list[Any]:
        """Exchanges a value with all workers, and waits for them.

        Args:
            operation: What this worker is doing; all must do the same.
            value: What JSON can say. A tuple comes back as a list.
            seconds: How long the others may take. Defaults to `timeout_seconds`.

        Returns:
            The values of all workers, by rank.

        Raises:
            WorkerFailedError: If a worker fails, or is in another operation.
            TypeError: If `value` is not one of JSON's.
            ValueError: If it is too large.
        """
        request = self._request(operation, value)
        with self.waiting(operation, seconds):
            values = self._connection.answer(self._connection.ask(*request))
            self._position.agreed()
        return values

    def tell(self, operation: str, value: Any = None) -> Callable[[], list[Any]]:
        """Exchanges a value with all workers, and goes on meanwhile.

        It counts as a call of `agree` here: all workers make both in the same order.

        Args:
            operation: See `agree`.
            value: See `agree`.

        Returns:
            A function that waits for the others and returns what `agree` returns. It
            need not be called.
        """
        reply = self._connection.ask(*self._request(operation, value))

        def told() -> list[Any]:
            with self.waiting(operation):
                values = self._connection.answer(reply)
                self._position.agreed()
            return values

        return told

    def waiting(self, operation: str, seconds: float | None = None) -> Waiting:
        """Surrounds what waits for all other workers by other means.

        It sends nothing; the watchdog looks at it. All workers must enter the same
        operations in the same order.

        Args:
            operation: What messages call it.
            seconds: How long it may take. Defaults to `timeout_seconds`.

        Returns:
            A context manager.
        """
        return Waiting(self, operation, seconds)

    def leave(self) -> None:
        """Says goodbye and closes the connection; on the chief, the hub as well.

        It is called when the interpreter exits. Others that wait for this worker
        afterwards, or get to do so, fail.
        """
        if self._connection.left:
            return
        if self._at_leave:
            # It may wait for others to end, who may be waiting for this worker.
            self._connection.leaving()
        while self._at_leave:
            self._at_leave.pop()()
        ending.unregister(self)
        self._connection.leave()
        if self._hub is not None:
            self._hub.close()

    def raised(self, error: BaseException, trace: str) -> None:
        """Tells the others of an exception that ends this process."""
        what = f"{type(error).__name__}: {error}"[:_LONGEST_MESSAGE]
        first, *more = what.split("\n", 1)
        message = f"{self._connection.name} raised {first}"
        if self._position.last:
            message += f" (in or after `{self._position.last}`)"
        message = "\n".join([message, *more])
        # Another failure may have come first, and perhaps this exception of it.
        other = self._connection.fail(message, trace[-_LONGEST_TRACE:])
        if self._exit_process:
            status = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
            of_others = other or isinstance(error, WorkerFailedError)
            ending.exit_now(other, PEER_FAILED if of_others else status)

    def forget(self) -> None:
        """Closes, in a forked child, its copies of what belongs to the parent."""
        self._connection.forget()
        if self._hub is not None:
            self._hub.forget()

    def _request(self, operation: str, value: Any) -> tuple[int, bytes, str]:
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
        return number, line, operation

    def _after(self, error: BaseException | None, operation: str) -> None:
        """Raises the failure, if there is one, rather than what came of it."""
        connection = self._connection
        if isinstance(error, _KNOWN_TO_ALL) or connection.left:
            return
        ends = isinstance(error, StopIteration | StopAsyncIteration)
        failed = isinstance(error, Exception) and not ends
        if failed and not connection.failed.wait(_GRACE_SECONDS):
            trace = "".join(traceback.format_exception(error))
            connection.blame_who_left(operation, trace[-_LONGEST_TRACE:])
        if connection.failure is not None:
            connection.stop_here()
            raise WorkerFailedError(connection.failure) from error


class Waiting:
    """Marks that its member waits for all other workers; see `Member.waiting`."""

    __slots__ = ("_member", "_operation", "_outer", "_position", "_seconds")

    def __init__(self, member: Member, operation: str, seconds: float | None):
        self._member, self._operation, self._seconds = member, operation, seconds
        self._position = member._position

    def __enter__(self) -> None:
        self._outer = self._position.enter(self._operation, self._seconds)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is not None or self._member._connection.failure is not None:
                self._member._after(error, self._operation)
        finally:
            self._position.operation = self._outer
