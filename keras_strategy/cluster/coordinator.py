"""Coordinator: the chief's thread to which every worker holds one control connection.

It relays small messages and failures, and diagnoses why workers wait. An untrusted
client must not harm the workers, whatever it sends, and nothing that it sends is shown
to the user.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import secrets
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from keras_strategy.cluster import transport, watchdog
from keras_strategy.cluster.transport import ProtocolError
from keras_strategy.cluster.watchdog import WorkerState

# Time for a client to authenticate.
HANDSHAKE_SECONDS = 5.0
# Clients that may be connected without authentication, in addition to one for each
# worker. Beyond that the oldest are disconnected; a worker tries again.
_MAX_UNTRUSTED = 64
# Delay before the missing workers are reported, since many arrive at once.
_ARRIVAL_DELAY = 0.2
_FLUSH_SECONDS = 1.0

Message = dict[str, Any]
States = Mapping[int, WorkerState]


class Coordinator:
    """Server that relays messages between workers; its thread owns all its state."""

    def __init__(
        self, listeners: Sequence[socket.socket], names: Sequence[str], secret: str
    ):
        self._listeners, self._names, self._secret = listeners, list(names), secret
        self.addresses = [listener.getsockname()[:2] for listener in listeners]
        # Clients that have not authenticated, in the order of their connection.
        self._untrusted: dict[asyncio.StreamWriter, None] = {}
        self._arrival_timer: asyncio.TimerHandle | None = None
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._left: set[int] = set()
        # Workers that have left or announced it while they finish other work.
        self._leaving: set[int] = set()
        self._failed = False
        # The exchange in progress, by rank, and each worker's later ones.
        self._pending: dict[int, Message] = {}
        ranks = range(len(names))
        self._queued: dict[int, deque[Message]] = {rank: deque() for rank in ranks}
        # Inquiries of waiting workers, by rank: those of the report in progress, and
        # those of the next one.
        self._inquiries: dict[int, Message] = {}
        self._next_inquiries: dict[int, Message] = {}
        self._report_id = 0
        self._states: dict[int, WorkerState] = {}
        self._thread = transport.LoopThread("keras_strategy coordinator")
        # All workers connect at once; one that finds the backlog full tries again after
        # a second.
        backlog = _MAX_UNTRUSTED + len(names)
        servers = [
            asyncio.start_server(
                self._serve, sock=listener, limit=transport.MAX_LINE, backlog=backlog
            )
            for listener in listeners
        ]
        self._servers = [self._thread.run(server) for server in servers]

    @property
    def address(self) -> tuple[str, int]:
        """The address for this process, whatever it is for others."""
        host, port = self.addresses[0]
        return "127.0.0.1" if host in ("::", "0.0.0.0") else host, port

    def writers_of_others(self) -> list[asyncio.StreamWriter]:
        """Return the connections of the workers other than the chief."""
        return [self._writers[rank] for rank in sorted(self._writers) if rank]

    def close(self) -> None:
        """Deliver what was sent, close every connection and stop the thread."""
        self._thread.run(self._close())
        self._thread.stop(_FLUSH_SECONDS)

    def detach(self) -> None:
        transport.detach(*self._listeners, *self._writers.values(), *self._untrusted)

    async def _close(self) -> None:
        self._stop_listening()
        waits = []
        for writer in self._writers.values():
            writer.close()
            waits.append(writer.wait_closed())
        closed = asyncio.gather(*waits, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(closed, _FLUSH_SECONDS)

    def _stop_listening(self) -> None:
        for server in self._servers:
            server.close()
        for writer in self._untrusted:
            writer.transport.abort()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.closing(writer):
            self._untrusted[writer] = None
            if len(self._untrusted) > _MAX_UNTRUSTED + len(self._names):
                oldest = next(iter(self._untrusted))
                del self._untrusted[oldest]
                oldest.transport.abort()
            rank = None
            # An untrusted client may send anything.
            with contextlib.suppress(Exception):
                transport.configure_socket(writer)
                async with asyncio.timeout(HANDSHAKE_SECONDS):
                    rank = await self._admit(reader, writer)
            self._untrusted.pop(writer, None)
            if rank is None:
                return
            handle = functools.partial(self._handle, rank)
            why = await transport.handle_messages(reader, handle)
            if rank not in self._left:
                self._fail(f"{self._names[rank]} {why}")

    async def _admit(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> int | None:
        """Return the rank of a new client, or None if it is not admitted."""
        hello = await transport.receive(reader)
        if hello is None or hello.get("protocol") != transport.PROTOCOL:
            return None
        nonce = secrets.token_hex(16)
        writer.write(transport.encode({"type": "challenge", "nonce": nonce}))
        join = await transport.receive(reader) or {}
        claim = {"rank": join.get("rank"), "names": join.get("names")}
        about = hello.get("nonce"), nonce, claim
        if not transport.is_proof(join.get("proof"), self._secret, "worker", *about):
            writer.write(transport.encode({"type": "untrusted"}))
            return None
        refusal = self._refusal(**claim)
        kind = "welcome" if refusal is None else "refused"
        proof = transport.make_proof(self._secret, "chief", *about)
        answer = {"type": kind, "message": refusal, "proof": proof}
        writer.write(transport.encode(answer))
        if refusal is not None:
            return None
        rank = join["rank"]
        del self._untrusted[writer]
        self._writers[rank] = writer
        if len(self._writers) == len(self._names):
            self._stop_listening()
            self._send_missing()
        elif self._arrival_timer is None:
            loop = self._thread.loop
            self._arrival_timer = loop.call_later(_ARRIVAL_DELAY, self._send_missing)
        return rank

    def _send_missing(self) -> None:
        self._arrival_timer = None
        missing = [n for r, n in enumerate(self._names) if r not in self._writers]
        self._broadcast({"type": "arrived", "missing": missing})

    def _refusal(self, rank: Any, names: Any) -> str | None:
        if not isinstance(names, list) or len(names) != len(self._names):
            count = len(names) if isinstance(names, list) else names
            return (
                f"it counts {count} workers in the cluster, and the chief counts "
                f"{len(self._names)}"
            )
        if names != self._names:
            return f"it names the workers {names}, and the chief {self._names}"
        if type(rank) is not int or not 0 <= rank < len(names):
            return f"there is no rank {rank!r}"
        if rank in self._writers:
            return f"another process has already joined as {names[rank]}"
        return "the run there has failed" if self._failed else None

    def _handle(self, rank: int, message: Message) -> None:
        kind = message["type"]
        if kind == "exchange":
            self._exchange(rank, message)
        elif kind == "failed":
            self._fail(message["message"], message["details"])
        elif kind == "inquire":
            self._next_inquiries[rank] = message
            if not self._inquiries:
                self._request_report()
        elif kind == "state":
            if self._inquiries and message["report"] == self._report_id:
                self._states[rank] = WorkerState(**message["state"])
                if self._states.keys() >= self._writers.keys() - self._left:
                    self._diagnose(self._report_id)
        elif kind == "leaving":
            self._announce_leaving(rank)
        elif kind == "bye":
            self._left.add(rank)
            self._announce_leaving(rank)
            self._writers[rank].close()
        else:
            raise ProtocolError(f"of the unknown type {kind[:40]!r}")

    def _exchange(self, rank: int, message: Message) -> None:
        # Read the keys here, so that a message without one counts as its sender's.
        keys = ("id", "operation", "value")
        message = {key: message[key] for key in keys}
        if rank in self._pending:
            self._queued[rank].append(message)
            return
        self._pending[rank] = message
        first = next(iter(self._pending.values()))
        same = message["operation"] == first["operation"]
        while same and len(self._pending) == len(self._names):
            self._reply(self._pending)
            self._pending = {r: q.popleft() for r, q in self._queued.items() if q}
            same = len({m["operation"] for m in self._pending.values()}) < 2
        if not same:
            operations = {r: m["operation"] for r, m in self._pending.items()}
            self._fail(_mismatch_message(self._names, operations))
        elif self._leaving:
            self._check_leaving()

    def _reply(self, requests: dict[int, Message]) -> None:
        # Send equal values once: fingerprints are usually the same on all workers.
        texts = [json.dumps(requests[r]["value"]) for r in range(len(self._names))]
        numbers = {text: n for n, text in enumerate(dict.fromkeys(texts))}
        values = f'"values":[{",".join(numbers)}]'
        if len(numbers) > 1:
            values += f',"indices":{json.dumps([numbers[text] for text in texts])}'
        for r in requests.keys() - self._left:
            head = json.dumps({"type": "reply", "id": requests[r]["id"]})
            self._writers[r].write(f"{head[:-1]},{values}}}\n".encode())

    def _announce_leaving(self, rank: int) -> None:
        if rank not in self._leaving:
            self._leaving.add(rank)
            self._check_leaving()
            self._broadcast({"type": "left", "rank": rank})

    def _check_leaving(self) -> None:
        """Fail if a worker waits for an exchange that another one left without."""
        missing = sorted(self._leaving - self._pending.keys())
        waiting = [r for r in self._pending if r not in self._leaving]
        if missing and waiting:
            left = " and ".join(self._names[r] for r in missing)
            operation = self._pending[waiting[0]]["operation"]
            self._fail(
                f"{left} ended while {self._names[waiting[0]]} was waiting for it in "
                f"`{operation}`"
            )

    def _request_report(self) -> None:
        """Ask all workers for their state; `_diagnose` follows."""
        if self._failed:
            return
        self._inquiries, self._next_inquiries = self._next_inquiries, {}
        self._report_id += 1
        self._states = {}
        self._broadcast({"type": "report", "report": self._report_id})
        later = watchdog.ANSWER_SECONDS, self._diagnose, self._report_id
        self._thread.loop.call_later(*later)

    def _diagnose(self, report_id: int) -> None:
        if report_id != self._report_id or not self._inquiries:
            return
        inquiries, self._inquiries = self._inquiries, {}
        reports = self._names, self._states
        failure = _diagnose_deadlock(*reports, watchdog.DEADLOCK_SECONDS)
        for rank, inquiry in inquiries.items():
            state, timeout = self._states.get(rank), inquiry.get("timeout")
            # The worker may have left the operation since its inquiry.
            is_inside = state and state.inside and state.entered == inquiry["count"]
            if is_inside and timeout is not None and failure is None:
                failure = _diagnose_timeout(*reports, timeout)
        if failure is not None:
            self._fail(*failure)
        elif self._next_inquiries:
            self._request_report()

    def _fail(self, message: str, details: str = "") -> None:
        if not self._failed:
            self._failed = True
            self._broadcast({"type": "failed", "message": message, "details": details})

    def _broadcast(self, message: Message) -> None:
        line = transport.encode(message)
        # The chief last: a failure may end its process, and this thread with it.
        for rank in sorted(self._writers.keys() - self._left, reverse=True):
            self._writers[rank].write(line)


def _mismatch_message(names: Sequence[str], operations: Mapping[int, str]) -> str:
    by_worker = ", ".join(
        f"{name}: `{operations[rank]}`" if rank in operations else f"{name}: in neither"
        for rank, name in enumerate(names)
    )
    return (
        "All workers must make the same calls in the same order. They are in "
        f"different operations ({by_worker})."
    )


def _diagnose_deadlock(
    names: Sequence[str], states: States, seconds: float
) -> tuple[str, str] | None:
    """Return the error and all stacks if the workers wait for each other forever."""
    # Then every worker has waited for at least `seconds`, and since their last exchange
    # their operations differ. One that is merely behind has entered the same operations
    # as the others so far: it may be at work, such as compiling a step.
    reports = states.values()
    is_waiting = all(s.inside and s.seconds >= seconds for s in reports)
    is_same_place = len({s.exchanges for s in reports}) == 1
    if len(states) < len(names) or not is_waiting or not is_same_place:
        return None
    steps: dict[int, set[str]] = {}
    for state in states.values():
        for number, name in enumerate(state.since, start=state.before):
            # A quoted name inside it, such as a variable's, may count objects made by
            # one process.
            steps.setdefault(number, set()).add(name.partition(" '")[0])
    if all(len(step) == 1 for step in steps.values()):
        return None
    inside = {rank: str(state.inside) for rank, state in states.items()}
    message = _mismatch_message(names, inside)
    for topic in dict.fromkeys(key for s in states.values() for key in s.notes):
        notes = [states[rank].notes.get(topic) or "none" for rank in range(len(names))]
        if len(set(notes)) > 1:
            by_worker = "; ".join(map(": ".join, zip(names, notes, strict=True)))
            message += f" Their {topic} differ ({by_worker})."
    return message, _format_stacks(names, states)


def _diagnose_timeout(
    names: Sequence[str], states: States, timeout_seconds: float
) -> tuple[str, str] | None:
    """Return which workers hold up the others, as an error and their stacks."""
    front = max(states.values(), key=lambda state: state.count)
    reached = front.inside or front.last
    limit = f"within {timeout_seconds:g} s"
    causes: list[str] = []
    late: dict[int, WorkerState] = {}
    for rank, name in enumerate(names):
        state = states.get(rank)
        if state is None:
            causes.append(
                f"{name} did not reach `{reached}` {limit} and does not answer: its "
                "process is stopped, or one long call keeps Python busy"
            )
        elif state.count < front.count:
            late[rank] = state
            doing = f"is in `{state.inside}`" if state.inside else "is in no operation"
            further = front.last if state.inside == reached else reached
            causes.append(
                f"{name} did not reach `{further}` {limit}; it {doing}; its main "
                f"thread is in: {state.where}"
            )
    if causes:
        return "; ".join(causes), _format_stacks(names, late)
    operations = {r: state.inside or state.last for r, state in states.items()}
    if len(set(operations.values())) > 1:
        cause = _mismatch_message(names, operations)
    elif min(s.seconds for s in states.values() if s.inside) < timeout_seconds:
        return None  # the last one has just arrived
    else:
        cause = f"all workers reached `{reached}`, and it did not end {limit}"
    return cause, _format_stacks(names, states)


def _format_stacks(names: Sequence[str], states: States) -> str:
    return "\n".join(
        f"Main thread of {names[rank]}:\n{state.stack}"
        for rank, state in sorted(states.items())
    )
