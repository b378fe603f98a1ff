"""Where a worker's program is, for those who wait for it."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from types import FrameType

from keras_strategy.workers.watchdog import Operation

_FRAMES = 6
# How many of the operations since the last agreement are told.
_KEPT = 64


class Position:
    """Where a worker is: written by its own thread, read by its watchdog's.

    Attributes:
        count: How many operations it has entered.
        last: The one that it entered last.
        operation: The one that it is in.
        agreements: How many times it has agreed with all others.
        agreed_at: How many operations it had entered then.
        notes: What else it says of itself where the workers do not get on: words, by
            what they are about.
    """

    __slots__ = (
        *("_names", "_thread_id", "agreed_at", "agreements", "count", "last"),
        *("notes", "operation"),
    )

    def __init__(self) -> None:
        self._thread_id = threading.get_ident()
        self.count = 0
        self.last = ""
        self.operation: Operation | None = None
        self.agreements = 0
        self.agreed_at = 0
        self._names = [""] * _KEPT
        self.notes: dict[str, str] = {}

    def enter(self, name: str, seconds: float | None = None) -> Operation | None:
        """Enters an operation, and returns the one around it.

        Args:
            name: Its name.
            seconds: How long it may take, if that is its own.
        """
        outer = self.operation
        self.count = count = self.count + 1
        self.last = name
        self._names[count % _KEPT] = name
        self.operation = Operation(count, name, time.monotonic(), seconds)
        return outer

    def agreed(self) -> None:
        """Notes that all workers have agreed on something: they are at one place."""
        self.agreements += 1
        self.agreed_at = self.count

    def since(self) -> tuple[int, list[str]]:
        """The last operations since all agreed, and how many there were before them."""
        last = self.count
        first = max(self.agreed_at, last - _KEPT)
        names = [self._names[n % _KEPT] for n in range(first + 1, last + 1)]
        return first - self.agreed_at, names

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
