"""The chief's thread to which every worker holds one connection."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any

from keras_strategy.workers import verdict
from keras_strategy.workers.loop import LoopThread
from keras_strategy.workers.watchdog import ANSWER_SECONDS, DEADLOCK_SECONDS
from keras_strategy.workers.wire import (
    MAX_LINE,
    PROTOCOL,
    ProtocolError,
    encode,
    forget,
    listen,
    nonce,
    proof,
    proves,
    receive,
    tune,
)

# Who connects must say who they are within this time.
HELLO_SECONDS = 5.0
# How many who have not may be connected, besides as many as there are workers. Then
# those go that have been there for longest; a worker tries again.
_STRANGERS = 64
# How long those who have arrived are not told who has not, since many arrive at once.
_NEWS = 0.2
_FLUSH_SECONDS = 1.0

Message = dict[str, Any]


class Hub:
    """Passes messages between the workers, and notices who is gone.

    All its state belongs to its thread.

    Args:
        listeners: The open ports; closed when all workers have arrived.
        names: The workers' names, by rank.
        secret: What only the workers of this run know.
    """

    def __init__(
        self, listeners: Sequence[socket.socket], names: Sequence[str], secret: str
    ):
        self._listeners, self._names, self._secret = listeners, list(names), secret
        self.addresses = [listener.getsockname()[:2] for listener in listeners]
        # Who has connected and not said who they are, the first one first.
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._news: asyncio.TimerHandle | None = None
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._left: set[int] = set()
        # Those, and who has other things to end first.
        self._leaving: set[int] = set()
        self._failed = False
        # What each worker has said that not all have said yet, and what it said then.
        self._agreeing: dict[int, Message] = {}
        self._later: dict[int, deque[Message]] = {r: deque() for r in range(len(names))}
        # What workers ask that wait for long: those that are being answered, by what
        # all say to the inquiry of this number, and those that come next.
        self._asking: dict[int, Message] = {}
        self._asking_next: dict[int, Message] = {}
        self._inquiry = 0
        self._states: dict[int, verdict.State] = {}
        self._thread = LoopThread("keras_strategy hub")
        self._servers = [
            self._thread.run(
                asyncio.start_server(
                    self._connected,
                    sock=listener,
                    limit=MAX_LINE,
                    # All come at once, and who finds it full tries again in a second.
                    backlog=_STRANGERS + len(names),
                )
            )
            for listener in listeners
        ]

    @property
    def address(self) -> tuple[str, int]:
        """Where this process reaches it, whatever its name for others."""
        host, port = self.addresses[0]
        return "127.0.0.1" if host in ("::", "0.0.0.0") else host, port

    def close(self) -> None:
        """Ends the thread and closes every connection, what was sent delivered."""
        self._thread.run(self._close())
        self._thread.stop(_FLUSH_SECONDS)

    def forget(self) -> None:
        """Closes, in a forked child, its copies of what belongs to the parent."""
        forget(*self._listeners, *self._writers.values(), *self._strangers)

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
        for stranger in self._strangers:
            stranger.transport.abort()

    async def _connected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.closing(writer):
            rank = await self._introduced(reader, writer)
            if rank is None:
                return
            why = await listen(reader, functools.partial(self._handle, rank))
            if rank not in self._left:
                self._fail(f"{self._names[rank]} {why}")

    async def _introduced(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> int | None:
        """The rank of who has connected; None if it is not let in.

        A stranger's connection must not harm the others, whatever it sends, and
        nothing of that is shown to anybody.
        """
        self._strangers[writer] = None
        if len(self._strangers) > _STRANGERS + len(self._names):
            first = next(iter(self._strangers))
            del self._strangers[first]
            first.transport.abort()
        try:
            tune(writer)
            async with asyncio.timeout(HELLO_SECONDS):
                return await self._proved(reader, writer)
        except Exception:
            return None
        finally:
            self._strangers.pop(writer, None)

    async def _proved(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> int | None:
        hello = await receive(reader)
        if hello is None or hello.get("protocol") != PROTOCOL:
            return None
        mine = nonce()
        writer.write(encode({"type": "challenge", "nonce": mine}))
        said = await receive(reader)
        if said is None:
            return None
        claim = {"rank": said.get("rank"), "names": said.get("names")}
        about = hello.get("nonce"), mine, claim
        if not proves(said.get("proof"), self._secret, "worker", *about):
            writer.write(encode({"type": "stranger"}))
            return None
        refusal = self._refusal(**claim)
        answer = {"type": "welcome"}
        if refusal is not None:
            answer = {"type": "refused", "message": refusal}
        known = {"proof": proof(self._secret, "chief", *about)}
        writer.write(encode(answer | known))
        if refusal is not None:
            return None
        del self._strangers[writer]
        self._writers[said["rank"]] = writer
        if len(self._writers) == len(self._names):
            self._stop_listening()
            self._tell_missing()
        elif self._news is None:
            self._news = self._thread.loop.call_later(_NEWS, self._tell_missing)
        return said["rank"]

    def _tell_missing(self) -> None:
        self._news = None
        missing = [n for r, n in enumerate(self._names) if r not in self._writers]
        self._tell_all({"type": "arrived", "missing": missing})

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
            return f"another process has joined as {names[rank]} before"
        return "the run there has failed" if self._failed else None

    def _handle(self, rank: int, message: Message) -> None:
        kind = message["type"]
        if kind == "agree":
            self._agree(rank, message)
        elif kind == "failed":
            self._fail(message["message"], message["details"])
        elif kind == "inquire":
            self._asking_next[rank] = message
            if not self._asking:
                self._inquire()
        elif kind == "state":
            if self._asking and message["inquiry"] == self._inquiry:
                self._states[rank] = verdict.State(**message["state"])
                if self._states.keys() >= self._writers.keys() - self._left:
                    self._judge(self._inquiry)
        elif kind == "leaving":
            self._say_leaving(rank)
        elif kind == "bye":
            self._leave(rank)
        else:
            raise ProtocolError(f"of the type {kind[:40]!r}, which nobody knows")

    def _agree(self, rank: int, message: Message) -> None:
        # Named here, so that whose message lacks one of them is who has sent it.
        keys = ("id", "operation", "value")
        message = {key: message[key] for key in keys}
        if rank in self._agreeing:
            self._later[rank].append(message)
            return
        self._agreeing[rank] = message
        first = next(iter(self._agreeing.values()))
        same = message["operation"] == first["operation"]
        while same and len(self._agreeing) == len(self._names):
            self._answer(self._agreeing)
            # What they have said since then.
            self._agreeing = {
                r: said.popleft() for r, said in self._later.items() if said
            }
            same = len({m["operation"] for m in self._agreeing.values()}) < 2
        if not same:
            operations = {r: m["operation"] for r, m in self._agreeing.items()}
            self._fail(verdict.different_operations(self._names, operations))
        elif self._leaving:
            self._fail_for_leaving()

    def _answer(self, asked: dict[int, Message]) -> None:
        # What many say travels once, to each: of digests that all are the same, as
        # they should be, one.
        ranks = range(len(self._names))
        each = [json.dumps(asked[r]["value"]) for r in ranks]
        places = {text: n for n, text in enumerate(dict.fromkeys(each))}
        said = f"[{','.join(places)}]"
        which = json.dumps([places[text] for text in each])
        for r in asked.keys() - self._left:
            head = {"type": "reply", "id": asked[r]["id"]}
            line = f'{json.dumps(head)[:-1]},"said":{said}'
            if len(places) > 1:
                line += f',"which":{which}'
            self._writers[r].write(line.encode() + b"}\n")

    def _say_leaving(self, rank: int) -> None:
        if rank not in self._leaving:
            self._leaving.add(rank)
            self._fail_for_leaving()
            self._tell_all({"type": "left", "rank": rank})

    def _leave(self, rank: int) -> None:
        self._left.add(rank)
        self._say_leaving(rank)
        self._writers[rank].close()

    def _fail_for_leaving(self) -> None:
        """Fails if somebody waits for what a worker has not said before it left."""
        silent = sorted(self._leaving - self._agreeing.keys())
        waiting = [r for r in self._agreeing if r not in self._leaving]
        if silent and waiting:
            gone = " and ".join(self._names[r] for r in silent)
            operation = self._agreeing[waiting[0]]["operation"]
            self._fail(
                f"{gone} ended while {self._names[waiting[0]]} was waiting for it in "
                f"`{operation}`"
            )

    def _inquire(self) -> None:
        """Asks all workers where they are, and judges when they have answered."""
        if self._failed:
            return
        self._asking, self._asking_next = self._asking_next, {}
        self._inquiry += 1
        self._states = {}
        self._tell_all({"type": "report", "inquiry": self._inquiry})
        self._thread.loop.call_later(ANSWER_SECONDS, self._judge, self._inquiry)

    def _judge(self, inquiry: int) -> None:
        if inquiry != self._inquiry or not self._asking:
            return
        asking, self._asking = self._asking, {}
        failure = verdict.deadlock(self._names, self._states, DEADLOCK_SECONDS)
        for asker, question in asking.items():
            # The one who asked may have got on meanwhile.
            state = self._states.get(asker)
            if failure or not state or state.entered != question["count"]:
                continue
            timeout = question.get("timeout")
            if state.inside and timeout is not None:
                failure = verdict.stuck(self._names, self._states, timeout)
        if failure is not None:
            self._fail(*failure)
        elif self._asking_next:
            self._inquire()

    def _fail(self, message: str, details: str = "") -> None:
        if not self._failed:
            self._failed = True
            self._tell_all({"type": "failed", "message": message, "details": details})

    def _tell_all(self, message: Message) -> None:
        line = encode(message)
        # The chief's process may end when it hears of a failure, and this thread
        # with it.
        for rank in sorted(self._writers.keys() - self._left, reverse=True):
            self._writers[rank].write(line)
