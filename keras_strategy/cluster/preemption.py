"""Preemption: a worker's termination notice, and when all workers save and exit."""

import contextlib
import enum
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from keras_strategy.cluster import elastic
from keras_strategy.cluster.membership import Cluster
from keras_strategy.cluster.process_exit import EXIT_PREEMPTED
from keras_strategy.options import TerminationConfig

_POLL_SECONDS = 1.0
# A grace period is used up to this many steps and saves before its end.
_MARGIN = 3


class TerminationNotice:
    """Termination notice: SIGTERM in the main thread, or what `watch` polls."""

    def __init__(self, watch: Callable[[], bool] | None = None):
        # The monotonic time of its arrival.
        self.since: float | None = None
        self._watch = watch
        self._stopped = threading.Event()
        self._previous_handler: Any = None

    def start(self) -> None:
        watch = self._watch
        if watch is None:
            if threading.current_thread() is threading.main_thread():
                self._previous_handler = signal.signal(signal.SIGTERM, self._record)
            return

        def poll() -> None:
            while not self._stopped.wait(_POLL_SECONDS):
                if watch():
                    return self._record()

        threading.Thread(target=poll, name="preemption", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        in_main = threading.current_thread() is threading.main_thread()
        # Other code may have installed its own handler since.
        if in_main and signal.getsignal(signal.SIGTERM) == self._record:
            signal.signal(signal.SIGTERM, self._previous_handler or signal.SIG_DFL)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        self.start()
        try:
            yield
        finally:
            self.stop()

    def _record(self, *_: Any) -> None:
        if self.since is None:
            self.since = time.monotonic()


class NextAction(enum.Enum):
    """Action of all workers between two steps."""

    CONTINUE = 0
    SAVE = 1
    SAVE_AND_END = 2


class Preemption:
    """Agreement of all workers, after each step, on when they save and exit."""

    def __init__(self, config: TerminationConfig, cluster: Cluster | None):
        self.notice = TerminationNotice(config.termination_watcher_fn)
        self._config, self._cluster = config, cluster
        self._saved = self._ended = False
        # Mean duration of a step, and that of the last save.
        self._step_start: float | None = None
        self._steps = 0
        self._step_seconds = self._save_seconds = 0.0

    def after_step(self) -> NextAction:
        now = time.monotonic()
        if self._step_start is not None:
            self._steps += 1
            seconds = now - self._step_start
            self._step_seconds += (seconds - self._step_seconds) / self._steps
        self._step_start = now
        return self.after_epoch()

    def after_epoch(self) -> NextAction:
        """Return the action of all workers after an epoch, which is not a step."""
        if self._ended:
            return NextAction.CONTINUE
        since, is_due = self.notice.since, elastic.must_leave_cluster()
        if since is not None:
            left = since + (self._config.grace_period or 0.0) - time.monotonic()
            is_due |= left <= _MARGIN * (2 * self._step_seconds + self._save_seconds)
        states = [[since is not None, is_due]]
        if self._cluster is not None:
            states = self._cluster.exchange("whether to end", states[0])
        if any(due for _, due in states):
            self._ended = True
            return NextAction.SAVE_AND_END
        if any(noticed for noticed, _ in states) and not self._saved:
            self._saved = True
            return NextAction.SAVE
        return NextAction.CONTINUE

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Context manager that measures a save, and leaves it out of the step time."""
        begin = time.monotonic()
        yield
        self._step_start = time.monotonic()
        self._save_seconds = self._step_start - begin

    def end(self) -> None:
        self.notice.stop()
        if self.notice.since is None and elastic.elastic_worker() is not None:
            raise elastic.WorkersChangedError
        if self._config.exit_fn is None:
            sys.exit(EXIT_PREEMPTED)
        self._config.exit_fn()
