"""Warnings about slow operations: first steps, which compile, and the chief's writes.

`workers.patience` warns about waiting for other workers.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from keras_strategy.cluster import watchdog
from keras_strategy.cluster.membership import Cluster


class _Saying(threading.local):
    """True while this thread is in an operation that warns already."""

    yes = False


_saying = _Saying()


@contextlib.contextmanager
def warn_if_slow(what: str, cluster: Cluster | None) -> Iterator[None]:
    """Context manager that warns once if the outermost operation is slow."""
    if _saying.yes or (cluster is not None and not cluster.is_chief):
        yield
        return
    timer = threading.Timer(
        watchdog.SLOW_OPERATION_SECONDS,
        watchdog.logger.warning,
        ("%s has taken %g s, and goes on.", what, watchdog.SLOW_OPERATION_SECONDS),
    )
    timer.daemon = True
    timer.start()
    _saying.yes = True
    try:
        yield
    finally:
        _saying.yes = False
        timer.cancel()
        timer.join()  # at once, but where it is saying so


def run_first_step(
    step: Callable[..., Any], what: str, cluster: Cluster | None, *args: Any
) -> Any:
    """Call a function that may compile, with a warning if it is slow."""
    first = f"The first {what}, which builds and compiles what others use,"
    with warn_if_slow(first, cluster):
        return step(*args)
