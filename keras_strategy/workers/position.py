"""Where a worker's program is, for those who wait for it."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from types import FrameType

from keras_strategy.workers.watchdog import Operation

_FRAMES = 6


class Position:
    """Where a worker is: written by its own thread, read by its watchdog's.

    Attributes:
        count: How many operations it has entered.
        last: The one that it entered last.
        operation: The one that it is in.
    """

    __slots__ = ("_thread_id", "count", "last", "operation")

    def __init__(self) -> None:
        self._thread_id = threading.get_ident()
        self.count = 0
        self.last = ""
        self.operation: Operation | None = None

    def enter(self, name: str) -> Operation | None:
        """Enters an operation, and returns the one around it."""
        outer = self.operation
        self.count = count = self.count + 1
        self.last = name
        self.operation = Operation(count, name, time.monotonic())
        return outer

    def stack(self) -> tuple[str, str]:
        """Where its thread is: in a few words, and its innermost frames."""
        frame: FrameType | None = sys._current_frames().get(self._thread_id)
        if frame is None:
            return "a thread that has ended", ""
        frames = traceback.StackSummary.extract(
            traceback.walk_stack(frame), limit=_FRAMES, lookup_lines=True
        )
        frames.reverse()
        last = frames[-1]
        where = f"{last.name} ({last.filename}, line {last.lineno}"
        where += f": {last.line})" if last.line else ")"
        return where, "".join(frames.format())
