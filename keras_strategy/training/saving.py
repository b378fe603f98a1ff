"""Saving with several workers: once, by the chief, and atomically.

All workers run the same program, so all of them save models. The chief writes to a
temporary name beside the target, and the others wait. The next save removes what a
killed chief left. While the chief writes, sharded variables read as gathered values.

Slow operations are warned about: the chief's, and first steps, which compile.
`cluster.watchdog` warns about waiting for other workers.
"""

import contextlib
import os
import pathlib
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

from keras_strategy.cluster import watchdog
from keras_strategy.cluster.membership import Cluster
from keras_strategy.cluster.rendezvous import save_timeout_seconds
from keras_strategy.errors import WorkerFailedError
from keras_strategy.training.train_step import add_backend_hint

_Result = TypeVar("_Result")
_overrides: ContextVar[dict[int, Any] | None] = ContextVar("overrides", default=None)
_temporary_folder: ContextVar[str | None] = ContextVar("folder", default=None)
_is_timed: ContextVar[bool] = ContextVar("is_timed", default=False)


@contextlib.contextmanager
def warn_if_slow(what: str, cluster: Cluster | None) -> Iterator[None]:
    """Context manager that warns once if the outermost operation is slow."""
    if _is_timed.get() or (cluster is not None and not cluster.is_chief):
        yield
        return
    timer = threading.Timer(
        watchdog.SLOW_OPERATION_SECONDS,
        watchdog.logger.warning,
        ("%s has taken %g s so far.", what, watchdog.SLOW_OPERATION_SECONDS),
    )
    timer.daemon = True
    timer.start()
    token = _is_timed.set(True)
    try:
        yield
    finally:
        _is_timed.reset(token)
        timer.cancel()
        timer.join()  # waits only while it is logging


def run_first_step(
    step: Callable[..., Any], what: str, cluster: Cluster | None, *args: Any
) -> Any:
    first = f"The first {what}, which builds and compiles what later ones use,"
    with warn_if_slow(first, cluster):
        try:
            return step(*args)
        except Exception as error:
            add_backend_hint(error)
            raise


@contextlib.contextmanager
def variable_value_overrides(values: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    token = _overrides.set({id(variable): value for variable, value in values})
    try:
        yield
    finally:
        _overrides.reset(token)


def overridden_value(variable: Any) -> Any:
    """Return the value that overrides a variable's, or None."""
    values = _overrides.get()
    return None if values is None else values.get(id(variable))


def run_on_chief(
    cluster: Cluster | None, operation: str, work: Callable[[], _Result]
) -> _Result | None:
    """Run `work` on the chief alone, while the others wait; they return None."""
    if cluster is None:
        return work()
    result = error = None
    try:
        if cluster.is_chief:
            name = cluster.names[cluster.rank]
            with warn_if_slow(f"{name}: {operation}", cluster):
                result = work()
    except Exception as caught:
        error = caught
    raise_if_any_failed(cluster, operation, error, others_write=not cluster.is_chief)
    return result


def raise_if_any_failed(
    cluster: Cluster, operation: str, error: Exception | None, others_write: bool = True
) -> None:
    """Wait for all workers, and raise if one has failed; `error` is this worker's."""
    report = None if error is None else f"{type(error).__name__}: {error}"
    seconds = cluster.client.timeout_seconds
    if others_write:  # a lot, possibly
        seconds = save_timeout_seconds(seconds)
    reports = cluster.exchange(operation, report, seconds)
    if error is not None:
        raise error
    for name, problem in zip(cluster.names, reports, strict=True):
        if problem is not None:
            raise WorkerFailedError(f"{name} failed in {operation}: {problem}")


def temporary_folder() -> str | None:
    """Return the folder for temporary files of the current write, or None."""
    return _temporary_folder.get()


@contextlib.contextmanager
def atomic_write_path(path: str) -> Iterator[str]:
    """Context manager for a path beside `path`, which replaces it on success."""
    target = pathlib.Path(path)
    if "://" in path:
        # Object stores publish complete files only.
        yield path
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    # Keras derives the format from the suffix, so the file keeps its name.
    folder = target.parent / f".{target.name}.part"
    shutil.rmtree(folder, ignore_errors=True)
    complete, temporary = folder / "complete", folder / "temporary"
    complete.mkdir(parents=True)
    temporary.mkdir()
    token = _temporary_folder.set(str(temporary))
    try:
        yield os.path.join(complete, target.name)
        # Sharded weights consist of several files.
        for part in os.listdir(complete):
            source, place = os.path.join(complete, part), target.parent / part
            if os.path.isdir(source) and place.is_dir():
                shutil.rmtree(place)
            os.replace(source, place)
    finally:
        _temporary_folder.reset(token)
        shutil.rmtree(folder, ignore_errors=True)
