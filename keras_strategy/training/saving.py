"""Saving with several workers: once, by the chief, and atomically.

All workers run the same program, so all of them save models. The chief writes to a
temporary name beside the target, and the others wait. The next save removes what a
killed chief left. While the chief writes, sharded variables read as gathered values.
"""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

from keras_strategy.cluster.membership import Cluster
from keras_strategy.cluster.rendezvous import save_timeout_seconds
from keras_strategy.errors import WorkerFailedError
from keras_strategy.training import slow_operations

_Result = TypeVar("_Result")
_overrides: ContextVar[dict[int, Any] | None] = ContextVar("overrides", default=None)
_temporary_folder: ContextVar[str | None] = ContextVar("folder", default=None)


@contextlib.contextmanager
def variable_value_overrides(values: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Context manager in which variables read as the given values."""
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
    """Run `work` on the chief alone, while the other workers wait.

    Returns:
        The result of `work` on the chief, else None.

    Raises:
        WorkerFailedError: If the chief failed.
    """
    if cluster is None:
        return work()
    result = error = None
    try:
        if cluster.is_chief:
            with slow_operations.warn_if_slow(
                f"{cluster.names[cluster.rank]}: {operation}", cluster
            ):
                result = work()
    except Exception as caught:
        error = caught
    raise_if_any_failed(cluster, operation, error, others_write=not cluster.is_chief)
    return result


def raise_if_any_failed(
    cluster: Cluster,
    operation: str,
    error: Exception | None,
    others_write: bool = True,
) -> None:
    """Wait for all workers, and raise if one has failed.

    Args:
        cluster: The workers.
        operation: The operation's name, for messages.
        error: This worker's error, or None.
        others_write: Apply the longer timeout, as another worker may write a lot first.
    """
    report = None if error is None else f"{type(error).__name__}: {error}"
    seconds = cluster.client.timeout_seconds
    if others_write:
        seconds = save_timeout_seconds(seconds)
    reports = cluster.exchange(operation, report, seconds)
    if error is not None:
        raise error
    for name, problem in zip(cluster.names, reports, strict=True):
        if problem is not None:
            raise WorkerFailedError(f"{name} failed in {operation}: {problem}")


def temporary_folder() -> str | None:
    """Return the folder for temporary files of the current `replaced`, or None."""
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
