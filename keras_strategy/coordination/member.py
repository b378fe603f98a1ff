"""`Member`: one worker's part in its cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from keras_strategy.coordination import ending
from keras_strategy.coordination.hub import ANSWER_SECONDS, Hub, listen
from keras_strategy.coordination.joining import connect
from keras_strategy.coordination.settings import (
    RUN_VARIABLE,
    default_timeout_seconds,
    positive_seconds,
)
from keras_strategy.coordination.verdict import State
from keras_strategy.coordination.wire import (
    MAX_LINE,
    PROTOCOL,
    Lines,
    ProtocolError,
    decode,
    encode,
)
from keras_strategy.errors import ClusterError, WorkerFailedError

# How long the others may still take over an operation after one of them has left.
_LEFT_SECONDS = 5.0
# How long to wait for the hub to pass a failure on, before ending without it.
_VERDICT_SECONDS = 2.0
# The engine's own error about a worker that is gone comes with the hub's, or before.
_GRACE_SECONDS = 1.0
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
        connection: socket.socket,
        lines: Lines,
        hub: Hub | None,
        rank: int,
        names: list[str],
        timeout_seconds: float,
    ):
        self._connection, self._lines, self._hub = connection, lines, hub
        self._rank, self._names = rank, names
        self._timeout = timeout_seconds
        self._exit_process = False
        self._thread_id = threading.get_ident()
        self._at_leave: list[Callable[[], None]] = []
        # What this worker is doing: (count, operation, since when).
        self._count = 0
        self._last = ""
        self._operation: tuple[int, str, float] | None = None
        # What the hub has told.
        self._missing = list(names)
        self._ended: list[str] = []
        self._ended_at = 0.0
        self._heard_at = 0.0
        self._hub_gone = False
        self._all_there_or_failed = threading.Event()
        # Requests that wait for their replies.
        self._numbers = itertools.count()
        self._pending: dict[int, queue.SimpleQueue] = {}
        self._sending = threading.Lock()
        # The watchdog's question to the hub: about which operation, and when.
        self._asked: tuple[int, str, float] | None = None
        self._asked_at = 0.0
        # A failure that the hub has been told and has not yet told back.
        self._claim: tuple[float, str, str] | None = None
        self._failure: str | None = None
        self._failed = threading.Event()
        self._settling = threading.Lock()
        self._raising = False
        self._leaving = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="keras_strategy watchdog", daemon=True
        )

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
        member = cls(connection, lines, hub, rank, names, timeout_seconds)
        try:
            member._start(received, started + timeout_seconds)
        except BaseException:
            member.leave()
            raise
        member._exit_process = exit_process
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
        self._send(line)

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
        if self._leaving.is_set():
            return
        while self._at_leave:
            self._at_leave.pop()()
        self._leaving.set()
        ending.unregister(self)
        if self._thread.is_alive():
            self._send(encode({"type": "bye"}))
            self._thread.join(_VERDICT_SECONDS)
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._thread.join(_VERDICT_SECONDS)
        self._connection.close()
        if self._hub is not None:
            self._hub.close()
        self._wake()

    def raised(self, error: BaseException, trace: str) -> None:
        """Tells the others of an exception that ends this process."""
        with self._settling:
            self._raising = True
            settled = self._failure is not None
        told = ""
        if settled:
            self._stop_here()
        else:
            what = f"{type(error).__name__}: {error}"[:_LONGEST_MESSAGE]
            message = f"{self._names[self._rank]} raised {what}"
            if self._last:
                message += f" (in or after `{self._last}`)"
            self._fail(message, trace[-_LONGEST_TRACE:])
            self._failed.wait(_VERDICT_SECONDS)
            if self._failure is not None and not self._failure.startswith(message):
                told = self._report(self._failure)
        if self._exit_process:
            ending.exit_now(told)

    def forget(self) -> None:
        """Closes, in a forked child, its copies of what belongs to the parent."""
        self._leaving.set()
        self._connection.close()
        if self._hub is not None:
            self._hub.forget()

    # In the caller's thread.

    def _start(self, received: list[bytes], deadline: float) -> None:
        for line in received:
            self._handle(decode(line))
        self._thread.start()
        if not self._all_there_or_failed.wait(max(0.0, deadline - time.monotonic())):
            verb = "has" if len(self._missing) == 1 else "have"
            self._fail(
                f"{' and '.join(self._missing)} {verb} not arrived within "
                f"{self._timeout:g} s"
            )
            self._failed.wait(_VERDICT_SECONDS + 1)
        if self._failure is not None:
            raise ClusterError(self._failure)

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
        self._pending[number] = replies
        try:
            # After it is pending: a failure from here on wakes it.
            self._check()
            self._send(line)
            reply = replies.get(timeout=seconds)
        finally:
            del self._pending[number]
        if reply is None:
            self._check()
            raise WorkerFailedError(f"{self._names[0]} has ended")
        return reply["value"]

    def _check(self) -> None:
        if self._failure is not None:
            self._stop_here()
            raise WorkerFailedError(self._failure)
        if self._leaving.is_set():
            raise RuntimeError("This worker has left its cluster.")
        if self._hub_gone:
            raise WorkerFailedError(f"{self._names[0]} has ended")

    def _after(self, error: BaseException | None) -> None:
        """Raises the failure, if there is one, rather than what came of it."""
        if isinstance(error, Exception) and not isinstance(
            error, StopIteration | StopAsyncIteration | WorkerFailedError
        ):
            self._failed.wait(_GRACE_SECONDS)
        if self._failure is not None and not isinstance(error, WorkerFailedError):
            self._stop_here()
            raise WorkerFailedError(self._failure) from error

    def _stop_here(self) -> None:
        if self._exit_process:  # The watchdog is ending this process.
            self._thread.join(_STOP_SECONDS)

    # In either thread.

    def _send(self, line: bytes) -> None:
        # Who reads the connection notices that it is broken.
        with contextlib.suppress(OSError), self._sending:
            self._connection.sendall(line)

    def _fail(self, message: str, details: str = "") -> None:
        """Tells all workers, this one included, that they cannot go on."""
        if self._failure is None and self._claim is None:
            wait = 0.0 if self._hub_gone else _VERDICT_SECONDS
            self._claim = (time.monotonic() + wait, message, details)
            self._send(
                encode({"type": "failed", "message": message, "details": details})
            )

    def _report(self, failure: str) -> str:
        return f"keras_strategy: {self._names[self._rank]} ends. {failure}"

    # In the watchdog's thread.

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        interval = min(1.0, self._timeout / 4)
        while True:
            if self._hub_gone:
                if self._leaving.wait(interval):
                    return
            elif poller.poll(1000 * interval):
                self._receive()
                if self._hub_gone and self._leaving.is_set():
                    return
            self._look()

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
        self._hub_gone = True
        chief = self._names[0]
        if not self._leaving.is_set():
            if chief not in self._ended:
                self._fail(f"{chief} is gone without a word ({why})")
            self._wake()

    def _handle(self, message: dict[str, Any]) -> None:
        self._heard_at = time.monotonic()
        kind = message["type"]
        if kind == "reply":
            waiting = self._pending.get(message["id"])
            if waiting is not None:
                waiting.put(message)
        elif kind == "arrived":
            self._missing = message["missing"]
            if not self._missing:
                self._all_there_or_failed.set()
        elif kind == "report":
            where, stack = ending.stack_of(self._thread_id)
            operation = self._operation
            inside = operation[1] if operation else None
            state = State(self._count, self._last, inside, where, stack)
            self._send(encode({"type": "state", **dataclasses.asdict(state)}))
        elif kind == "left":
            self._ended.append(self._names[message["rank"]])
            self._ended_at = time.monotonic()
        elif kind == "failed":
            self._settle(message["message"], message["details"])

    def _look(self) -> None:
        """Fails when this worker has been waiting for too long."""
        now = time.monotonic()
        if self._claim is not None and now >= self._claim[0]:
            self._settle(*self._claim[1:])
        operation = self._operation
        if operation is None or self._failure is not None or self._leaving.is_set():
            return
        _, name, since = operation
        if self._ended and now - max(since, self._ended_at) > _LEFT_SECONDS:
            self._fail(
                f"{' and '.join(self._ended)} ended while {self._names[self._rank]} "
                f"was waiting for it in `{name}`"
            )
        elif now - since > self._timeout:
            self._inquire(operation, now)

    def _inquire(self, operation: tuple[int, str, float], now: float) -> None:
        """Has the hub ask who keeps the others waiting."""
        overdue = now - self._asked_at > ANSWER_SECONDS + _LEFT_SECONDS
        if self._asked is not operation or (
            overdue and self._heard_at > self._asked_at
        ):
            self._asked, self._asked_at = operation, now
            question = {"count": operation[0], "timeout": self._timeout}
            self._send(encode({"type": "inquire", **question}))
        elif overdue:
            self._fail(
                f"{self._names[0]} does not answer, and {self._names[self._rank]} has "
                f"been in `{operation[1]}` for {now - operation[2]:.0f} s: its process "
                "is stopped, or one long call keeps Python busy"
            )

    def _settle(self, message: str, details: str) -> None:
        """Takes a failure as final, and ends the process if that may be done."""
        with self._settling:
            if self._failure is not None:
                return
            text = message
            operation = self._operation
            if operation is not None:
                text += f" [{self._names[self._rank]} was in `{operation[1]}`]"
            if details:
                text += "\n" + details.rstrip()
            self._failure = text
            # The thread that raises ends the process, when it has been heard.
            end_here = self._exit_process and not self._raising
        self._failed.set()
        self._all_there_or_failed.set()
        if end_here:
            ending.exit_now(self._report(text))
        self._wake()

    def _wake(self) -> None:
        for replies in list(self._pending.values()):
            replies.put(None)


class Waiting:
    """Marks that its member waits for all other workers; see `Member.waiting`."""

    __slots__ = ("_member", "_operation", "_outer")

    def __init__(self, member: Member, operation: str):
        self._member, self._operation = member, operation

    def __enter__(self) -> None:
        member = self._member
        self._outer = member._operation
        member._count = count = member._count + 1
        member._last = self._operation
        member._operation = (count, self._operation, time.monotonic())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        member = self._member
        try:
            if error is not None or member._failure is not None:
                member._after(error)
        finally:
            member._operation = self._outer
