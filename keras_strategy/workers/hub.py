"""The chief's thread to which every worker holds one connection."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import os
import socket
import threading
from collections.abc import Sequence
from typing import Any

from keras_strategy.workers import verdict
from keras_strategy.workers.settings import PORT_VARIABLE, host_port, is_loopback
from keras_strategy.workers.wire import (
    MAX_LINE,
    PROTOCOL,
    ProtocolError,
    decode,
    encode,
    tune,
)

# Who connects must say who they are within this time.
HELLO_SECONDS = 5.0
# A process that is well says within this time what it is doing.
ANSWER_SECONDS = 5.0
_FLUSH_SECONDS = 1.0


def listen(host: str, port: int) -> socket.socket:
    """Opens the port where the workers meet.

    A host that is the loopback tells that all workers are on this machine, since
    no other could reach it there; then no other machine can connect.

    Raises:
        OSError: If it cannot be opened, such as when it is taken.
    """
    try:
        if is_loopback(host):
            if ":" in host:
                return socket.create_server((host, port), family=socket.AF_INET6)
            name = host.lower().startswith("localhost")
            return socket.create_server(("127.0.0.1" if name else host, port))
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):
                return socket.create_server(
                    ("", port), family=socket.AF_INET6, dualstack_ipv6=True
                )
        return socket.create_server(("", port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise OSError(
            errno.EADDRINUSE,
            f"Address already in use: {host_port(host, port)}, where the workers are "
            "to meet. End the process that listens there (perhaps one of an earlier "
            f"run), or set the environment variable {PORT_VARIABLE} to a free port, "
            "the same on every worker.",
        ) from None


class Hub:
    """Passes messages between the workers, and notices who is gone.

    All its state belongs to its thread.

    Args:
        listener: The open port.
        names: The workers' names, by rank.
        run_id: What only the workers of this run know.
    """

    def __init__(self, listener: socket.socket, names: Sequence[str], run_id: str):
        self._listener = listener
        self._names = list(names)
        self._run_id = run_id
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._left: set[int] = set()
        self._failure: bytes | None = None
        self._agreeing: dict[int, dict[str, Any]] = {}
        self._published: dict[str, Any] = {}
        self._lookups: dict[str, list[tuple[int, int]]] = {}
        self._inquiry: dict[int, verdict.State] | None = None
        self._all_answered = asyncio.Event()
        self._closing = asyncio.Event()
        self._tasks: set[asyncio.Task] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._run, name="keras_strategy hub", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and closes every connection, what was sent delivered."""
        with contextlib.suppress(RuntimeError):  # It has ended already.
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(2 * _FLUSH_SECONDS)

    def forget(self) -> None:
        """Closes, in a forked child, its copies of what belongs to the parent."""
        sockets = [w.get_extra_info("socket") for w in self._writers.values()]
        null = os.open(os.devnull, os.O_RDWR)
        for number in [s.fileno() for s in (self._listener, *sockets)]:
            # Rather than close it: the objects that own it will, when it may be
            # another file's.
            if number >= 0:
                os.dup2(null, number, inheritable=False)
        os.close(null)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._connected, sock=self._listener, limit=MAX_LINE
        )
        await self._closing.wait()
        server.close()
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
        try:
            tune(writer.get_extra_info("socket"))
            rank = await self._welcome(reader, writer)
            if rank is not None:
                await self._listen_to(rank, reader)
        # A stranger's connection must not harm the others, whatever it sends.
        except (OSError, ProtocolError, ValueError):
            pass
        finally:
            writer.close()

    async def _welcome(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> int | None:
        """The rank of who connected, or None for who does not belong here."""
        async with asyncio.timeout(HELLO_SECONDS):
            hello = decode(await reader.readline())
        if hello.get("protocol") != PROTOCOL or hello["type"] != "hello":
            raise ProtocolError("not a worker")
        reason = self._refusal(hello)
        if reason is not None:
            writer.write(encode({"type": "refused", "message": reason}))
            return None
        rank = hello["rank"]
        self._writers[rank] = writer
        writer.write(encode({"type": "welcome"}))
        missing = [n for r, n in enumerate(self._names) if r not in self._writers]
        self._tell_all({"type": "arrived", "missing": missing})
        return rank

    def _refusal(self, hello: dict[str, Any]) -> str | None:
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
        if self._failure is not None:
            return "the run there has failed"
        return None

    async def _listen_to(self, rank: int, reader: asyncio.StreamReader) -> None:
        name = self._names[rank]
        try:
            while line := await reader.readline():
                if await self._handle(rank, decode(line)):
                    return
            why = "its process was killed or crashed"
        except OSError as error:
            why = f"its process crashed, or its machine is gone: {error}"
        except (ProtocolError, ValueError) as error:
            why = f"what it sent cannot be understood: {error}"
        self._fail(f"{name} is gone without a word ({why})")

    async def _handle(self, rank: int, message: dict[str, Any]) -> bool:
        """Does what a worker asks for; true if that was the last thing."""
        kind = message["type"]
        if kind == "agree":
            self._agree(rank, message)
        elif kind == "publish":
            key = message["key"]
            self._published[key] = message["value"]
            for asker, number in self._lookups.pop(key, []):
                self._reply(asker, number, message["value"])
        elif kind == "lookup":
            key = message["key"]
            if key in self._published:
                self._reply(rank, message["id"], self._published[key])
            else:
                self._lookups.setdefault(key, []).append((rank, message["id"]))
        elif kind == "failed":
            self._fail(message["message"], message["details"])
        elif kind == "inquire":
            if self._inquiry is None and self._failure is None:
                task = asyncio.create_task(self._inquire(rank, message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        elif kind == "state":
            if self._inquiry is not None:
                self._inquiry[rank] = verdict.State.from_message(message)
                if self._inquiry.keys() >= self._writers.keys() - self._left:
                    self._all_answered.set()
        elif kind == "bye":
            self._leave(rank)
            return True
        else:
            raise ProtocolError(f"a message of type {kind!r}")
        return False

    def _agree(self, rank: int, message: dict[str, Any]) -> None:
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
                self._reply(r, request["id"], values)

    def _leave(self, rank: int) -> None:
        self._left.add(rank)
        self._agreeing.pop(rank, None)
        if self._agreeing:
            self._fail_for_left()
        self._tell_all({"type": "left", "rank": rank})

    def _fail_for_left(self) -> None:
        rank, request = next(iter(self._agreeing.items()))
        gone = " and ".join(self._names[r] for r in sorted(self._left))
        self._fail(
            f"{gone} ended while {self._names[rank]} was waiting for it in "
            f"`{request['operation']}`"
        )

    async def _inquire(self, asker: int, question: dict[str, Any]) -> None:
        self._inquiry = {}
        self._all_answered.clear()
        self._tell_all({"type": "report"})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._all_answered.wait()
        states, self._inquiry = self._inquiry, None
        # The one who asked may have got on meanwhile.
        state = states.get(asker)
        if state and state.inside and state.count == question["count"]:
            failure = verdict.stuck(self._names, states, question["timeout"])
            if failure is not None:
                self._fail(*failure)

    def _fail(self, message: str, details: str = "") -> None:
        if self._failure is not None:
            return
        line = encode({"type": "failed", "message": message, "details": details})
        self._failure = line
        # The chief's process may end when it hears it, and this thread with it.
        for rank in sorted(self._writers.keys() - self._left, reverse=True):
            self._writers[rank].write(line)

    def _reply(self, rank: int, number: int, value: Any) -> None:
        self._writers[rank].write(
            encode({"type": "reply", "id": number, "value": value})
        )

    def _tell_all(self, message: dict[str, Any]) -> None:
        line = encode(message)
        for rank in self._writers.keys() - self._left:
            self._writers[rank].write(line)
