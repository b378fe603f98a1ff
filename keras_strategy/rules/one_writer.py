"""What several workers write: once, by the chief, and whole.

All workers run the same program, so all of them save models. The chief writes, under
another name first, and the others wait for it.
"""

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

from keras_strategy.errors import WorkerFailedError
from keras_strategy.workers.cluster import Cluster


@contextlib.contextmanager
def saving(cluster: Cluster, filepath: Any, what: str) -> Iterator[str | os.PathLike]:
    """Gives the path to save to, and waits until the chief has.

    All workers save, since saving may read what only all of them can; the files of
    those that are not the chief are thrown away.

    Args:
        cluster: The workers.
        filepath: Where the user wants the file.
        what: What is done, for messages.

    Raises:
        WorkerFailedError: If the chief could not write it.
    """
    path = os.fspath(filepath)
    operation = f"{what} to {os.path.basename(path)}"
    error: Exception | None = None
    with contextlib.ExitStack() as cleaning:
        try:
            if cluster.is_chief:
                with _replaced(path) as temporary:
                    yield temporary
            else:
                folder = cleaning.enter_context(tempfile.TemporaryDirectory())
                yield os.path.join(folder, os.path.basename(path))
        except Exception as caught:
            error = caught
        said = None if error is None else f"{type(error).__name__}: {error}"
        told = cluster.agree(operation, said)
    if error is not None:
        raise error
    for name, problem in zip(cluster.names, told, strict=True):
        if problem is not None:
            raise WorkerFailedError(f"{name} failed in {operation}: {problem}")


@contextlib.contextmanager
def _replaced(path: str) -> Iterator[str]:
    """A path beside another one, which takes its place when all went well."""
    target = pathlib.Path(path)
    if "://" in path:
        # An object store shows a file when it is whole.
        yield path
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    # Keras knows formats by the ends of names, so that the end must stay.
    folder = tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        temporary = os.path.join(folder, target.name)
        yield temporary
        # Weights in several shards are several files.
        for part in os.listdir(folder):
            source, place = os.path.join(folder, part), target.parent / part
            if os.path.isdir(source) and place.is_dir():
                shutil.rmtree(place)
            os.replace(source, place)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
