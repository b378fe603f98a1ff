"""Event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Daemon thread that runs an event loop until it is stopped."""

    def __init__(self, name: str):
        self.loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call_soon(self, function: Callable[..., object], *arguments: Any) -> None:
        """Schedule a call in the thread; do nothing if the thread has ended."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *arguments)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def stop(self, seconds: float) -> None:
        """Stop the thread and wait at most `seconds` for its end."""
        self.call_soon(self._stopped.set)
        self.join(seconds)

    def join(self, seconds: float) -> None:
        """Wait at most `seconds` for the end of the thread."""
        self._thread.join(seconds)

    def _run(self) -> None:
        # asyncio.Runner may start a thread for its shutdown, which Python refuses
        # while the interpreter exits.
        self.loop.run_until_complete(self._until_stopped())
        self.loop.close()

    async def _until_stopped(self) -> None:
        await self._stopped.wait()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
