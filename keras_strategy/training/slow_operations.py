"""Warnings about slow operations: first steps, which compile, and the chief's writes.

`cluster.watchdog` warns about waiting for other workers.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from keras_strategy.cluster import watchdog
from keras_strategy.cluster.membership import Cluster


class _ThreadState(threading.local):
    """True while this thread is in an operation that warns already."""

    warns = False


_thread = _ThreadState()


@contextlib.contextmanager
def warn_if_slow(what: str, cluster: Cluster | None) -> Iterator[None]:
    """Context manager that warns once if the outermost operation is slow."""
    if _thread.warns or (cluster is not None and not cluster.is_chief):
        yield
        return
    timer = threading.Timer(
        watchdog.SLOW_OPERATION_SECONDS,
        watchdog.logger.warning,
        ("%s has taken %g s so far.", what, watchdog.SLOW_OPERATION_SECONDS),
    )
    timer.daemon = True
    timer.start()
    _thread.warns = True
    try:
        yield
    finally:
        _thread.warns = False
        timer.cancel()
        timer.join()  # waits only while it is logging


def run_first_step(
    step: Callable[..., Any], what: str, cluster: Cluster | None, *args: Any
) -> Any:
    """Call a function that may compile, with a warning if it is slow."""
    first = f"The first {what}, which builds and compiles what later ones use,"
    with warn_if_slow(first, cluster):
        return step(*args)
