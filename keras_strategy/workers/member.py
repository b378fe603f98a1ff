"""`Member`: one worker's part in its cluster."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from keras_strategy.errors import ClusterError, WorkerFailedError
from keras_strategy.workers import ending
from keras_strategy.workers.hub import Hub, listen
from keras_strategy.workers.joining import connect
from keras_strategy.workers.settings import (
    RUN_VARIABLE,
    default_timeout_seconds,
    positive_seconds,
)
from keras_strategy.workers.watchdog import VERDICT_SECONDS, Position, Watchdog
from keras_strategy.workers.wire import MAX_LINE, PROTOCOL, Lines, encode

# The engine's own error about a worker that is gone comes with the hub's, or before.
_GRACE_SECONDS = 1.0
# How long the watchdog may take to end the process.
_STOP_SECONDS = 10.0
# What is told of an exception.
_LONGEST_MESSAGE, _LONGEST_TRACE = 2_000, 20_000


class Member:
    """One worker's part in its cluster. Made by `join`.

    The workers make the same calls in the same order, each from one thread. When
    one of them fails, all end: see `join`.
    """

    def __init__(
        self,
        watchdog: Watchdog,
        position: Position,
        hub: Hub | None,
        rank: int,
        names: list[str],
        timeout_seconds: float,
    ):
        self._watchdog, self._position, self._hub = watchdog, position, hub
        self._rank, self._names = rank, names
        self._timeout = timeout_seconds
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
        started = time.monotonic()
        hello = {"type": "hello", "protocol": PROTOCOL, "run": run_id}
        hello |= {"rank": rank, "names": names}
        # An answer to `agree` has a value of each.
        lines = Lines(MAX_LINE * (len(names) + 1))
        hub = None
        with contextlib.ExitStack() as on_error:
            if rank == 0:
                listener = listen(*address)
                hub = Hub(listener, names, run_id)
                on_error.callback(hub.close)
                # It need not be able to reach itself by the name it has for others.
                host, port = listener.getsockname()[:2]
                address = ("127.0.0.1" if host in ("::", "0.0.0.0") else host, port)
            connection, received = connect(address, hello, lines, timeout_seconds)
            on_error.pop_all()
        position = Position()
        watchdog = Watchdog(connection, lines, position, rank, names, timeout_seconds)
        member = cls(watchdog, position, hub, rank, names, timeout_seconds)
        try:
            member._start(received, started + timeout_seconds)
        except BaseException:
            member.leave()
            raise
        watchdog.exit_process = exit_process
        ending.register(member)
        return member

    @property
    def rank(self) -> int:
        """Which of the workers this is."""
        return self._rank

    @property
    def names(self) -> list[str]:
        """What messages call the workers, by rank."""
        return list(self._names)

    @property
    def timeout_seconds(self) -> float:
        """How long a worker waits for the others."""
        return self._timeout

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
        message = {"type": "agree", "operation": operation, "value": value}
        request = self._request(message, f"`value` in {operation!r}")
        with self.waiting(operation):
            return self._ask(*request)

    def publish(self, key: str, value: Any) -> None:
        """Lets every worker look a value up.

        Args:
            key: Its name. What was published under it before is replaced.
            value: What JSON can say.

        Raises:
            WorkerFailedError: If a worker has failed.
            TypeError: If `value` is not one of JSON's.
            ValueError: If it is too large.
        """
        message = {"type": "publish", "key": key, "value": value}
        _, line = self._request(message, f"`value` of {key!r}")
        self._check()
        self._watchdog.send(line)

    def lookup(self, key: str, timeout_seconds: float | None = None) -> Any:
        """Returns what a worker publishes, and waits until one does.

        Args:
            key: The name of the value.
            timeout_seconds: How long to wait. Defaults to that of `join`.

        Raises:
            WorkerFailedError: If a worker fails.
            TimeoutError: If nobody publishes it in time.
        """
        seconds = self._timeout if timeout_seconds is None else timeout_seconds
        request = self._request({"type": "lookup", "key": key}, "`key`")
        try:
            return self._ask(*request, seconds)
        except queue.Empty:
            raise TimeoutError(
                f"no worker has published {key!r} within {seconds:g} s"
            ) from None

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
        if self._watchdog.leaving.is_set():
            return
        while self._at_leave:
            self._at_leave.pop()()
        ending.unregister(self)
        self._watchdog.stop()
        if self._hub is not None:
            self._hub.close()

    def raised(self, error: BaseException, trace: str) -> None:
        """Tells the others of an exception that ends this process."""
        watchdog = self._watchdog
        with watchdog.lock:
            watchdog.raising = True
            settled = watchdog.failure is not None
        told = ""
        if settled:
            self._stop_here()
        else:
            what = f"{type(error).__name__}: {error}"[:_LONGEST_MESSAGE]
            message = f"{self._names[self._rank]} raised {what}"
            if self._position.last:
                message += f" (in or after `{self._position.last}`)"
            watchdog.fail(message, trace[-_LONGEST_TRACE:])
            watchdog.failed.wait(VERDICT_SECONDS)
            # Another failure came first, and perhaps this exception of it.
            if watchdog.failure and not watchdog.failure.startswith(message):
                told = watchdog.report(watchdog.failure)
        if watchdog.exit_process:
            ending.exit_now(told)

    def forget(self) -> None:
        """Closes, in a forked child, its copies of what belongs to the parent."""
        self._watchdog.forget()
        if self._hub is not None:
            self._hub.forget()

    def _start(self, received: list[bytes], deadline: float) -> None:
        watchdog = self._watchdog
        watchdog.start(received)
        if not watchdog.settled.wait(max(0.0, deadline - time.monotonic())):
            missing = watchdog.missing
            verb = "has" if len(missing) == 1 else "have"
            watchdog.fail(
                f"{' and '.join(missing)} {verb} not arrived within {self._timeout:g} s"
            )
            watchdog.failed.wait(VERDICT_SECONDS + 1)
        if watchdog.failure is not None:
            kind = ClusterError if watchdog.missing else WorkerFailedError
            raise kind(watchdog.failure)

    def _request(self, message: dict[str, Any], name: str) -> tuple[int, bytes]:
        number = next(self._numbers)
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

    def _ask(self, number: int, line: bytes, seconds: float | None = None) -> Any:
        """Sends a request and returns the value of its reply."""
        replies: queue.SimpleQueue = queue.SimpleQueue()
        self._watchdog.pending[number] = replies
        try:
            # After it is pending: a failure from here on wakes it.
            self._check()
            self._watchdog.send(line)
            reply = replies.get(timeout=seconds)
        finally:
            del self._watchdog.pending[number]
        if reply is None:
            self._check()
            raise AssertionError("woken without a reason")
        return reply["value"]

    def _check(self) -> None:
        watchdog = self._watchdog
        if watchdog.failure is not None:
            self._stop_here()
            raise WorkerFailedError(watchdog.failure)
        if watchdog.leaving.is_set():
            raise RuntimeError("This worker has left its cluster.")
        if watchdog.hub_gone:
            raise WorkerFailedError(f"{self._names[0]} has ended")

    def _after(self, error: BaseException | None) -> None:
        """Raises the failure, if there is one, rather than what came of it."""
        if isinstance(error, WorkerFailedError) or self._watchdog.leaving.is_set():
            return
        if isinstance(error, Exception) and not isinstance(
            error, StopIteration | StopAsyncIteration
        ):
            self._watchdog.failed.wait(_GRACE_SECONDS)
        if self._watchdog.failure is not None:
            self._stop_here()
            raise WorkerFailedError(self._watchdog.failure) from error

    def _stop_here(self) -> None:
        if self._watchdog.exit_process:  # Its thread is ending this process.
            self._watchdog.join(_STOP_SECONDS)


class Waiting:
    """Marks that its member waits for all other workers; see `Member.waiting`."""

    __slots__ = ("_member", "_operation", "_outer", "_position")

    def __init__(self, member: Member, operation: str):
        self._member, self._operation = member, operation
        self._position = member._position

    def __enter__(self) -> None:
        position = self._position
        self._outer = position.operation
        position.count = count = position.count + 1
        position.last = self._operation
        position.operation = (count, self._operation, time.monotonic())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is not None or self._member._watchdog.failure is not None:
                self._member._after(error)
        finally:
            self._position.operation = self._outer
