"""Coordinator: the chief's thread to which every worker holds one control connection.

It relays small messages and failures. An untrusted client must not harm the workers,
whatever it sends, and nothing that it sends is shown to the user.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any

from keras_strategy.cluster import failure_diagnosis
from keras_strategy.cluster.transport import (
    MAX_LINE,
    PROTOCOL,
    LoopThread,
    ProtocolError,
    configure_socket,
    detach,
    encode,
    handle_messages,
    is_proof,
    make_proof,
    new_nonce,
    receive,
)
from keras_strategy.cluster.watchdog import ANSWER_SECONDS, DEADLOCK_SECONDS

# Time for a client to authenticate.
HANDSHAKE_SECONDS = 5.0
# Clients that may be connected without authentication, in addition to one for each
# worker. Beyond that the oldest are disconnected; a worker tries again.
_MAX_UNTRUSTED = 64
# Delay before the missing workers are reported, since many arrive at once.
_ARRIVAL_DELAY = 0.2
_FLUSH_SECONDS = 1.0

Message = dict[str, Any]


class Coordinator:
    """Server that relays messages between the workers and detects failures.

    All its state belongs to its thread. It closes the listeners when all workers have
    arrived.
    """

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
        self._queued: dict[int, deque[Message]] = {
            r: deque() for r in range(len(names))
        }
        # Inquiries of waiting workers, by rank: those of the report in progress, and
        # those of the next one.
        self._inquiries: dict[int, Message] = {}
        self._next_inquiries: dict[int, Message] = {}
        self._report_id = 0
        self._states: dict[int, failure_diagnosis.WorkerState] = {}
        self._thread = LoopThread("keras_strategy coordinator")
        self._servers = [
            self._thread.run(
                asyncio.start_server(
                    self._serve,
                    sock=listener,
                    limit=MAX_LINE,
                    # All workers connect at once; one that finds the backlog full
                    # tries again after a second.
                    backlog=_MAX_UNTRUSTED + len(names),
                )
            )
            for listener in listeners
        ]

    @property
    def address(self) -> tuple[str, int]:
        """The address for this process, whatever it is for others."""
        host, port = self.addresses[0]
        return "127.0.0.1" if host in ("::", "0.0.0.0") else host, port

    def close(self) -> None:
        """Deliver what was sent, close every connection and stop the thread."""
        self._thread.run(self._close())
        self._thread.stop(_FLUSH_SECONDS)

    def detach(self) -> None:
        """Close a forked child's copies of the parent's sockets."""
        detach(*self._listeners, *self._writers.values(), *self._untrusted)

    async def _close(self) -> None:
        self._stop_listening()
        writers = list(self._writers.values())
        for writer in writers:
            writer.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_SECONDS):
                await asyncio.gather(
                    *(w.wait_closed() for w in writers), return_exceptions=True
                )

    def _stop_listening(self) -> None:
        for server in self._servers:
            server.close()
        for writer in self._untrusted:
            writer.transport.abort()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.closing(writer):
            rank = await self._admit(reader, writer)
            if rank is None:
                return
            why = await handle_messages(reader, functools.partial(self._handle, rank))
            if rank not in self._left:
                self._fail(f"{self._names[rank]} {why}")

    async def _admit(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> int | None:
        """Return the rank of a new client, or None if it is not admitted."""
        self._untrusted[writer] = None
        if len(self._untrusted) > _MAX_UNTRUSTED + len(self._names):
            oldest = next(iter(self._untrusted))
            del self._untrusted[oldest]
            oldest.transport.abort()
        try:
            configure_socket(writer)
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                return await self._authenticate(reader, writer)
        except Exception:
            return None
        finally:
            self._untrusted.pop(writer, None)

    async def _authenticate(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> int | None:
        hello = await receive(reader)
        if hello is None or hello.get("protocol") != PROTOCOL:
            return None
        nonce = new_nonce()
        writer.write(encode({"type": "challenge", "nonce": nonce}))
        join = await receive(reader)
        if join is None:
            return None
        claim = {"rank": join.get("rank"), "names": join.get("names")}
        about = hello.get("nonce"), nonce, claim
        if not is_proof(join.get("proof"), self._secret, "worker", *about):
            writer.write(encode({"type": "untrusted"}))
            return None
        refusal = self._refusal(**claim)
        answer = {"type": "welcome"}
        if refusal is not None:
            answer = {"type": "refused", "message": refusal}
        answer["proof"] = make_proof(self._secret, "chief", *about)
        writer.write(encode(answer))
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
        """Return why a worker of this run is not admitted, or None."""
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
                self._states[rank] = failure_diagnosis.WorkerState(**message["state"])
                if self._states.keys() >= self._writers.keys() - self._left:
                    self._diagnose(self._report_id)
        elif kind == "leaving":
            self._announce_leaving(rank)
        elif kind == "bye":
            self._leave(rank)
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
            self._fail(failure_diagnosis.mismatch_message(self._names, operations))
        elif self._leaving:
            self._check_leaving()

    def _reply(self, requests: dict[int, Message]) -> None:
        # Send equal values once: fingerprints are usually the same on all workers.
        texts = [json.dumps(requests[r]["value"]) for r in range(len(self._names))]
        numbers = {text: n for n, text in enumerate(dict.fromkeys(texts))}
        values = f"[{','.join(numbers)}]"
        indices = json.dumps([numbers[text] for text in texts])
        for r in requests.keys() - self._left:
            head = {"type": "reply", "id": requests[r]["id"]}
            line = f'{json.dumps(head)[:-1]},"values":{values}'
            if len(numbers) > 1:
                line += f',"indices":{indices}'
            self._writers[r].write(line.encode() + b"}\n")

    def _announce_leaving(self, rank: int) -> None:
        if rank not in self._leaving:
            self._leaving.add(rank)
            self._check_leaving()
            self._broadcast({"type": "left", "rank": rank})

    def _leave(self, rank: int) -> None:
        self._left.add(rank)
        self._announce_leaving(rank)
        self._writers[rank].close()

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
        self._thread.loop.call_later(ANSWER_SECONDS, self._diagnose, self._report_id)

    def _diagnose(self, report_id: int) -> None:
        if report_id != self._report_id or not self._inquiries:
            return
        inquiries, self._inquiries = self._inquiries, {}
        failure = failure_diagnosis.diagnose_deadlock(
            self._names, self._states, DEADLOCK_SECONDS
        )
        for rank, inquiry in inquiries.items():
            state = self._states.get(rank)
            # The worker may have left the operation since its inquiry.
            if failure or not state or state.entered != inquiry["count"]:
                continue
            timeout = inquiry.get("timeout")
            if state.inside and timeout is not None:
                failure = failure_diagnosis.diagnose_timeout(
                    self._names, self._states, timeout
                )
        if failure is not None:
            self._fail(*failure)
        elif self._next_inquiries:
            self._request_report()

    def _fail(self, message: str, details: str = "") -> None:
        if not self._failed:
            self._failed = True
            self._broadcast({"type": "failed", "message": message, "details": details})

    def _broadcast(self, message: Message) -> None:
        line = encode(message)
        # The chief last: a failure may end its process, and this thread with it.
        for rank in sorted(self._writers.keys() - self._left, reverse=True):
            self._writers[rank].write(line)
