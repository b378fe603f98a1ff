"""A thread that does all that a worker, or the hub, does at its own pace."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """A daemon thread that runs an event loop until it is stopped.

    Args:
        name: The thread's name.
    """

    def __init__(self, name: str):
        self.loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def soon(self, function: Callable[..., object], *arguments: Any) -> None:
        """Has something called in the thread; nothing where it has ended."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *arguments)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Returns what a coroutine returns that runs in the thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def stop(self, seconds: float) -> None:
        """Ends the thread, which may take as long as this."""
        self.soon(self._stopped.set)
        self.join(seconds)

    def join(self, seconds: float) -> None:
        """Waits for the end of the thread."""
        self._thread.join(seconds)

    def _run(self) -> None:
        # An asyncio.Runner may start a thread to end with, which is refused when the
        # interpreter exits.
        self.loop.run_until_complete(self._until_stopped())
        self.loop.close()

    async def _until_stopped(self) -> None:
        await self._stopped.wait()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
