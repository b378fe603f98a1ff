"""How a worker learns that its machine is taken away, and when all of them end."""

import contextlib
import enum
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from keras_strategy.options.termination import TerminationConfig
from keras_strategy.workers.exit_codes import PREEMPTED

_POLL_SECONDS = 1.0
# With a period of grace, it ends so many steps and savings before.
_MARGIN = 3


class Notice:
    """Whether this worker was told that it is to end.

    Args:
        watch: Is asked once a second, in a thread of its own; None takes SIGTERM,
            in the main thread alone, which is the one that Python tells.

    Attributes:
        since: When it was told, on the monotonic clock; None until then.
    """

    def __init__(self, watch: Callable[[], bool] | None = None):
        self.since: float | None = None
        self._watch = watch
        self._stopped = threading.Event()
        self._before: Any = None

    def start(self) -> None:
        """Listens from now on."""
        if self._watch is not None:
            threading.Thread(target=self._poll, name="preemption", daemon=True).start()
        elif threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)

    def stop(self) -> None:
        """Listens no more."""
        self._stopped.set()
        if threading.current_thread() is not threading.main_thread():
            return
        # Somebody else may listen by now.
        if signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Surrounds what a notice does not end at once."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def _note(self, *_: Any) -> None:
        if self.since is None:
            self.since = time.monotonic()

    def _poll(self) -> None:
        assert self._watch is not None
        while not self._stopped.wait(_POLL_SECONDS):
            if self._watch():
                self._note()
                return


class Next(enum.Enum):
    """What all workers do between two steps."""

    GO_ON = 0
    SAVE = 1
    SAVE_AND_END = 2


class Preemption:
    """Has the workers agree, after each step, on when they save and end.

    Args:
        config: What the user has chosen.
        agree: What each worker says of what this one says.

    Attributes:
        notice: This worker's.
    """

    def __init__(
        self, config: TerminationConfig, agree: Callable[[list[bool]], list[list[bool]]]
    ):
        self.notice = Notice(config.termination_watcher_fn)
        self._config, self._agree = config, agree
        self._saved = self._over = False
        # How long a step takes, and saving.
        self._began: float | None = None
        self._steps = 0
        self._step_seconds = self._save_seconds = 0.0

    def after_step(self) -> Next:
        """What all workers do now."""
        if not self._over:
            self._measure_step()
        return self.after_epoch()

    def after_epoch(self) -> Next:
        """What all workers do when an epoch has ended, which is no step."""
        if self._over:
            return Next.GO_ON
        told = self._agree([self.notice.since is not None, self._is_due()])
        if any(due for _, due in told):
            self._over = True
            return Next.SAVE_AND_END
        if any(asked for asked, _ in told) and not self._saved:
            self._saved = True
            return Next.SAVE
        return Next.GO_ON

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Surrounds what saves, which counts when the end is near."""
        begin = time.monotonic()
        yield
        self._began = time.monotonic()
        self._save_seconds = self._began - begin

    def end(self) -> None:
        """Ends the process, unless the user's function has it go on."""
        self.notice.stop()
        if self._config.exit_fn is None:
            sys.exit(PREEMPTED)
        self._config.exit_fn()

    def _measure_step(self) -> None:
        now = time.monotonic()
        if self._began is not None:
            self._steps += 1
            self._step_seconds += (now - self._began - self._step_seconds) / self._steps
        self._began = now

    def _is_due(self) -> bool:
        since = self.notice.since
        if since is None:
            return False
        left = since + (self._config.grace_period or 0.0) - time.monotonic()
        return left <= _MARGIN * (2 * self._step_seconds + self._save_seconds)
