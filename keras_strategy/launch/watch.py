"""Watching the processes of a cluster until all have ended."""

import time
from collections.abc import Callable, Sequence

from keras_strategy.launch.processes import Process


class Watch:
    """Notices how processes end, and ends those that take too long to.

    Attributes:
        running: The ranks of the processes whose end was not noticed yet.
        failed: The rank of the one that failed first, if one did.

    Args:
        processes: By rank.
    """

    def __init__(self, processes: Sequence[Process]) -> None:
        self.running: set[int] = set()
        self.failed: int | None = None
        self._processes = processes
        self._kill_at = float("inf")

    def until_all_ended(
        self, meanwhile: Callable[[], None], when_one_failed: Callable[[int], None]
    ) -> None:
        """Returns when all processes have ended.

        Args:
            meanwhile: Is called again and again while some run, and takes its time.
            when_one_failed: Is called once, with the status of the first that failed.
        """
        self.running = set(range(len(self._processes)))
        while self.running:
            meanwhile()
            for rank in sorted(self.running):
                status = self._processes[rank].poll()
                if status is None:
                    continue
                self.running.discard(rank)
                if status != 0 and self.failed is None:
                    self.failed = rank
                    when_one_failed(status)
            if time.monotonic() >= self._kill_at:
                for rank in self.running:
                    self._processes[rank].kill()

    def let_end(self, grace_seconds: float) -> None:
        """Gives the processes this time to end, from the first call on."""
        self._kill_at = min(self._kill_at, time.monotonic() + grace_seconds)
