"""The batches of `fit` and its like, where several workers read them.

Every worker reads the same global batches and computes on its own rows of them. Before
a step they agree that there is one: a worker that has no batch left would leave the
others waiting. They tell it one batch ahead, so that nobody waits for it while a step
could compute.
"""

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from keras_strategy.errors import WorkerInputError, WorkerReadError
from keras_strategy.input import notices
from keras_strategy.input.own_rows import LocalRows
from keras_strategy.rules import alike
from keras_strategy.rules.step import count_rows
from keras_strategy.workers.cluster import Cluster


class SynchronizedBatches:
    """Gives a worker its batches while all workers have one.

    Args:
        batches: The batches, tuples of arrays or tensors; read anew for each `iter`.
        cluster: The workers.
        counts: What is known of the batches, if they are arrays: the workers compare
            it once, and need not do so for each batch.
        pauses: See `read_synchronized`. If not given, none is read ahead.
        tells: Whether who reads whole batches is told what that costs.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        cluster: Cluster,
        counts: list | None = None,
        pauses: Callable[[int], bool] = lambda taken: True,
        tells: bool = False,
    ):
        self._batches = batches
        self._cluster = cluster
        self._counts = counts
        self._pauses = pauses
        self._tells = tells

    def __iter__(self) -> Iterator[Any]:
        """Starts to read.

        Raises:
            WorkerInputError: If the workers' batches differ in their numbers of rows,
                or another worker could not read its batch.
        """
        # Now, not when the first batch is asked for: to start may draw random numbers.
        iterator = iter(self._batches)
        return self._known(iterator) if self._counts else self._agreed(iterator)

    def _known(self, iterator: Iterator[Any]) -> Iterator[Any]:
        told = self._cluster.exchange("the start of an epoch", self._counts)
        if any(other != told[0] for other in told):
            raise WorkerInputError(
                "All workers must be given the same arrays: each computes on its "
                "own rows of every batch. Received arrays of other numbers of "
                f"rows or batches: {self._cluster.format_by_worker(told)}."
            )
        yield from iterator

    def _agreed(self, iterator: Iterator[Any]) -> Iterator[Any]:
        read = itertools.count()

        def describe(batch):
            return _rows_if_there(batch) if next(read) else _rows_and_digest(batch)

        def accept(batch, told):
            if None in told:
                self._warn(told)
                return None
            rows = [said[0] for said in told]
            if len(set(rows)) > 1:
                raise WorkerInputError(
                    "All workers must be given the same batches: each computes on its "
                    "own rows of every batch. Received batches of different numbers "
                    f"of rows: {self._cluster.format_by_worker(rows)}."
                )
            if any(said[:2] != told[0][:2] for said in told):
                raise self._difference(batch, [mark for _, mark, *_ in told])
            if not isinstance(batch, LocalRows):
                if self._tells:
                    notices.warn_full_reads(self._cluster)
            elif any(said != told[0] for said in told):
                self._of_other_data(batch, [mark for *_, mark in told])
            return batch

        name = "the next batch"
        return read_synchronized(
            iterator, self._cluster, name, describe, accept, self._pauses
        )

    def _difference(self, batch: Any, marks: list) -> WorkerInputError:
        digests = self._cluster.format_by_value(marks)
        if isinstance(batch, LocalRows):
            return WorkerInputError(
                "All workers must read in the same order: each reads its own rows of "
                "every batch. Received a batch of other rows on some workers (digests "
                f"of their numbers by worker: {digests}). Give a generator of a "
                "sampler's own the same seed on all of them."
            )
        return WorkerInputError(
            "All workers must be given the same batches: each computes on its own "
            "rows of every batch. Received other values in the first one (digests "
            f"by worker: {digests}). If each worker reads rows of its own, "
            "distribute its dataset with `AutoShardPolicy.OFF`."
        )

    def _of_other_data(self, batch: LocalRows, digests: list) -> None:
        """Raises where the data differs; what is drawn anew may, with a warning."""
        if batch.reread_digest is not None and batch.reread_digest() == batch.digest:
            raise WorkerInputError(
                "All workers must be given the same data: each reads its own rows of "
                "every batch. Received other values in rows that all of them have read "
                f"(digests by worker: {self._cluster.format_by_value(digests)}), and the same "
                "each time. If each worker's data is a part of its own, "
                "distribute it with `AutoShardPolicy.OFF`. If rows are drawn by their "
                "numbers, seed that alike on all workers."
            )
        notices.warn_if_rows_differ(self._cluster)

    def _warn(self, told: list) -> None:
        ended = [i for i, rows in enumerate(told) if rows is None]
        if len(ended) == len(told):
            return
        names = ", ".join(self._cluster.names[i] for i in ended)
        warnings.warn(
            f"The data of some workers ({names}) has ended before that of the others; "
            "the epoch ends here on all workers.",
            stacklevel=2,
        )


def read_synchronized(
    iterator: Iterator[Any],
    cluster: Cluster,
    operation: str,
    describe: Callable[[Any], Any],
    accept: Callable[[Any, list[Any]], Any],
    pauses: Callable[[int], bool],
) -> Iterator[Any]:
    """Reads what all workers read, one item ahead of who takes them.

    Args:
        iterator: See `read_ahead`.
        cluster: See `read_ahead`.
        operation: See `read_ahead`.
        describe: See `read_ahead`.
        accept: Makes what is given of an item and of what each worker says of its own;
            None at the end. It raises where they do not fit, and no more is read.
        pauses: Whether after so many items the next one is not read before it is asked
            for, which it may not be.
    """

    def read():
        return read_ahead(iterator, cluster, operation, describe)

    ahead = read()
    for taken in itertools.count(1):
        accepted = accept(*ahead())
        if accepted is None:
            return
        paused = pauses(taken)
        if not paused:
            ahead = read()
        yield accepted
        if paused:
            ahead = read()


def read_next(
    iterator: Iterator[Any],
    cluster: Cluster,
    operation: str,
    describe: Callable[[Any], Any],
) -> tuple[Any, list[Any]]:
    """Reads on, and learns what the other workers have read; see `read_ahead`."""
    return read_ahead(iterator, cluster, operation, describe)()


def read_ahead(
    iterator: Iterator[Any],
    cluster: Cluster,
    operation: str,
    describe: Callable[[Any], Any],
) -> Callable[[], tuple[Any, list[Any]]]:
    """Reads on, and tells the other workers what was read.

    Args:
        iterator: What this worker reads. It never gives None.
        cluster: The workers.
        operation: What they read, for messages.
        describe: Gives what the others are told of an item, of JSON's values but no
            dict; it is called with None at the end of the iterator.

    Returns:
        A function that waits for the others. It returns this worker's item, None at
        the end, and what each worker says, by rank. It raises a WorkerReadError if
        another worker could not read its item; if this one could not, that error, when
        the others have been told.
    """
    item = error = None
    try:
        item = next(iterator, None)
        said = describe(item)
    except Exception as caught:
        error, said = caught, {"error": f"{type(caught).__name__}: {caught}"}
    answers = cluster.start_exchange(operation, said)

    def of_all() -> tuple[Any, list[Any]]:
        told = answers()
        if error is not None:
            raise error
        for name, other in zip(cluster.names, told, strict=True):
            if isinstance(other, dict):
                raise WorkerReadError(
                    f"'{name}' could not read {operation}: {other['error']}"
                )
        return item, told

    return of_all


def _rows_and_digest(batch: Any) -> list | None:
    if batch is None or isinstance(batch, LocalRows):
        return _rows_if_there(batch)
    return [count_rows(batch), digest_of(batch)]


def digest_of(batch: Any) -> str:
    """A digest of the first rows of a batch, of dashes alone if it cannot be made."""
    leaves = keras.tree.flatten(batch)
    return "-".join((alike.rows_fingerprint(leaf) or "")[:8] for leaf in leaves)


def _rows_if_there(batch: Any) -> list | None:
    if batch is None:
        return None
    if isinstance(batch, LocalRows):
        return [batch.global_rows, str(batch.order_checksum), batch.digest]
    return [count_rows(batch), ""]
