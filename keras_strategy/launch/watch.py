"""Watching the processes of a cluster until all have ended."""

import signal
import time
from collections.abc import Callable, Sequence

from keras_strategy.launch.processes import Process
from keras_strategy.workers.exit_codes import EXIT_OTHER_WORKER_FAILED


class ProcessWatch:
    """Notices how processes end, and ends those that take too long to.

    Attributes:
        running: The ranks of the processes whose end was not noticed yet.
        failed: The rank of the one that failed first, if one did; of those that ended
            because another failed, only if no other did.

    Args:
        processes: By rank.
    """

    def __init__(self, processes: Sequence[Process]) -> None:
        self.running: set[int] = set()
        self.failed: int | None = None
        self._processes = processes
        self._kill_at = float("inf")
        self._ending = False

    def until_all_ended(
        self, meanwhile: Callable[[], None], on_failure: Callable[[int], None]
    ) -> None:
        """Returns when all processes have ended.

        Args:
            meanwhile: Is called again and again while some run, and takes its time.
            on_failure: Is called with the status of the first that failed, and
                again where that one ended because of another that ends later.
        """
        self.running = set(range(len(self._processes)))
        while self.running:
            meanwhile()
            for rank in sorted(self.running):
                status = self._processes[rank].poll()
                if status is None:
                    continue
                self.running.discard(rank)
                if status != 0 and (self.failed is None or self._is_cause(status)):
                    self.failed = rank
                    on_failure(status)
            if time.monotonic() >= self._kill_at:
                for rank in self.running:
                    self._processes[rank].kill()

    def _is_cause(self, status: int) -> bool:
        """Whether it ended by itself, where the first that failed did not."""
        assert self.failed is not None
        first = self._processes[self.failed].poll()
        own = status not in (EXIT_OTHER_WORKER_FAILED, -signal.SIGTERM, -signal.SIGKILL)
        return first == EXIT_OTHER_WORKER_FAILED and (own or not self._ending)

    def let_end(self, grace_seconds: float) -> None:
        """Gives the processes this time to end, from the first call on."""
        self._ending = True
        self._kill_at = min(self._kill_at, time.monotonic() + grace_seconds)
