"""The chief's thread to which every worker holds one connection."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import socket
from collections.abc import Sequence
from typing import Any

from keras_strategy.workers import verdict
from keras_strategy.workers.loop import LoopThread
from keras_strategy.workers.watchdog import ANSWER_SECONDS
from keras_strategy.workers.wire import (
    MAX_LINE,
    PROTOCOL,
    ProtocolError,
    encode,
    forget,
    listen,
    receive,
    tune,
)

# Who connects must say who they are within this time.
HELLO_SECONDS = 5.0
_FLUSH_SECONDS = 1.0

Message = dict[str, Any]


class Hub:
    """Passes messages between the workers, and notices who is gone.

    All its state belongs to its thread.

    Args:
        listener: The open port.
        names: The workers' names, by rank.
        run_id: What only the workers of this run know.
    """

    def __init__(self, listener: socket.socket, names: Sequence[str], run_id: str):
        self._listener, self._names, self._run_id = listener, list(names), run_id
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._left: set[int] = set()
        self._failed = False
        self._agreeing: dict[int, Message] = {}
        # What a worker asked that waits for too long, and what all have answered.
        self._inquiry: tuple[int, Message] | None = None
        self._states: dict[int, verdict.State] = {}
        self._thread = LoopThread("keras_strategy hub")
        server = asyncio.start_server(self._connected, sock=listener, limit=MAX_LINE)
        self._server = self._thread.run(server)

    @property
    def address(self) -> tuple[str, int]:
        """Where this process reaches it, whatever its name for others."""
        host, port = self._listener.getsockname()[:2]
        return "127.0.0.1" if host in ("::", "0.0.0.0") else host, port

    def close(self) -> None:
        """Ends the thread and closes every connection, what was sent delivered."""
        self._thread.run(self._close())
        self._thread.stop(_FLUSH_SECONDS)

    def forget(self) -> None:
        """Closes, in a forked child, its copies of what belongs to the parent."""
        forget(self._listener, *self._writers.values())

    async def _close(self) -> None:
        self._server.close()
        writers = list(self._writers.values())
        for writer in writers:
            writer.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_SECONDS):
                await asyncio.gather(
                    *(w.wait_closed() for w in writers), return_exceptions=True
                )

    async def _connected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        # A stranger's connection must not harm the others, whatever it sends.
        with contextlib.closing(writer), contextlib.suppress(OSError, ProtocolError):
            tune(writer)
            async with asyncio.timeout(HELLO_SECONDS):
                hello = await receive(reader)
            if hello is not None and self._welcome(hello, writer):
                rank = hello["rank"]
                why = await listen(reader, functools.partial(self._handle, rank))
                if rank not in self._left:
                    gone = f"{self._names[rank]} is gone without a word ({why})"
                    self._fail(gone)

    def _welcome(self, hello: Message, writer: asyncio.StreamWriter) -> bool:
        """Lets a worker in, or tells it why not."""
        if hello.get("protocol") != PROTOCOL or hello["type"] != "hello":
            return False
        refusal = self._refusal(hello)
        if refusal is not None:
            writer.write(encode({"type": "refused", "message": refusal}))
            return False
        self._writers[hello["rank"]] = writer
        writer.write(encode({"type": "welcome"}))
        missing = [n for r, n in enumerate(self._names) if r not in self._writers]
        self._tell_all({"type": "arrived", "missing": missing})
        return True

    def _refusal(self, hello: Message) -> str | None:
        names, rank = hello.get("names"), hello.get("rank")
        mine = str(hello.get("run")).encode()
        if not hmac.compare_digest(mine, self._run_id.encode()):
            return "the chief there belongs to another run"
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
            if self._inquiry is None and not self._failed:
                self._inquire(rank, message)
        elif kind == "state":
            self._states[rank] = verdict.State(**message["state"])
            if self._states.keys() >= self._writers.keys() - self._left:
                self._judge()
        elif kind == "bye":
            self._leave(rank)
        else:
            raise ProtocolError(f"a message of type {kind!r}")

    def _agree(self, rank: int, message: Message) -> None:
        self._agreeing[rank] = message
        operations = {r: m["operation"] for r, m in self._agreeing.items()}
        if len(set(operations.values())) > 1:
            self._fail(verdict.different_operations(self._names, operations))
        elif self._left:
            self._fail_for_left()
        elif len(self._agreeing) == len(self._names):
            asked, self._agreeing = self._agreeing, {}
            values = [asked[r]["value"] for r in range(len(self._names))]
            for r, request in asked.items():
                reply = {"type": "reply", "id": request["id"], "values": values}
                self._writers[r].write(encode(reply))

    def _leave(self, rank: int) -> None:
        self._left.add(rank)
        self._agreeing.pop(rank, None)
        if self._agreeing:
            self._fail_for_left()
        self._tell_all({"type": "left", "rank": rank})
        self._writers[rank].close()

    def _fail_for_left(self) -> None:
        rank, request = next(iter(self._agreeing.items()))
        gone = " and ".join(self._names[r] for r in sorted(self._left))
        self._fail(
            f"{gone} ended while {self._names[rank]} was waiting for it in "
            f"`{request['operation']}`"
        )

    def _inquire(self, asker: int, question: Message) -> None:
        """Asks all workers where they are, and judges when they have answered."""
        self._inquiry = asker, question
        self._states = {}
        self._tell_all({"type": "report"})
        self._timer = self._thread.loop.call_later(ANSWER_SECONDS, self._judge)

    def _judge(self) -> None:
        if self._inquiry is None:
            return
        (asker, question), self._inquiry = self._inquiry, None
        self._timer.cancel()
        # The one who asked may have got on meanwhile.
        state = self._states.get(asker)
        if state and state.inside and state.count == question["count"]:
            failure = verdict.stuck(self._names, self._states, question["timeout"])
            if failure is not None:
                self._fail(*failure)

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
