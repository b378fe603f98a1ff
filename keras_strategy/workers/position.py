"""Operation trace: where each worker currently is, and who holds up the others."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from types import FrameType

from keras_strategy.workers.watchdog import Operation

_MAX_FRAMES = 6
# Operations since the last exchange that a report names.
_MAX_NAMES = 64


class OperationTrace:
    """Operations of a worker: written by its main thread, read by its watchdog.

    Attributes:
        count: Number of operations entered.
        last: Name of the operation entered last.
        operation: The current operation.
        exchanges: Number of completed exchanges with all workers.
        notes: What a report of a deadlock compares between workers, by topic.
    """

    __slots__ = (
        *("_count_at_exchange", "_names", "_thread_id", "count", "exchanges", "last"),
        *("notes", "operation"),
    )

    def __init__(self) -> None:
        self._thread_id = threading.get_ident()
        self.count = 0
        self.last = ""
        self.operation: Operation | None = None
        self.exchanges = 0
        self._count_at_exchange = 0
        self._names = [""] * _MAX_NAMES
        self.notes: dict[str, str] = {}

    def enter(self, name: str, seconds: float | None = None) -> Operation | None:
        """Enter an operation, with its own time limit if any; return the outer one."""
        outer = self.operation
        self.count = count = self.count + 1
        self.last = name
        self._names[count % _MAX_NAMES] = name
        self.operation = Operation(count, name, time.monotonic(), seconds)
        return outer

    def record_exchange(self) -> None:
        """Record that all workers are at the same place in the program."""
        self.exchanges += 1
        self._count_at_exchange = self.count

    def since_exchange(self) -> tuple[int, list[str]]:
        """Return the last operations since the exchange, and how many preceded them."""
        first = max(self._count_at_exchange, self.count - _MAX_NAMES)
        names = [self._names[n % _MAX_NAMES] for n in range(first + 1, self.count + 1)]
        return first - self._count_at_exchange, names

    def stack(self) -> tuple[str, str]:
        """Return the current line of the thread, and its innermost frames."""
        frame: FrameType | None = sys._current_frames().get(self._thread_id)
        if frame is None:
            return "a thread that has ended", ""
        frames = traceback.StackSummary.extract(
            traceback.walk_stack(frame), limit=_MAX_FRAMES, lookup_lines=True
        )
        frames.reverse()
        last = frames[-1]
        where = f"{last.name} ({last.filename}, line {last.lineno}"
        where += f": {last.line})" if last.line else ")"
        return where, "".join(frames.format())
