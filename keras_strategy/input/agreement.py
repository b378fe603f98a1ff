"""The batches of `fit` and its like, where several workers read them.

Every worker reads the same global batches and computes on its own rows of them. Before
a step they agree that there is one: a worker that has no batch left would leave the
others waiting.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from keras_strategy.errors import WorkerInputError
from keras_strategy.rules.step import rows_of
from keras_strategy.workers.cluster import Cluster


class AgreedBatches:
    """Gives a worker its batches while all workers have one.

    Args:
        batches: The batches, tuples of arrays or tensors; read anew for each `iter`.
        cluster: The workers.
        counts: What is known of the batches, if they are arrays: the workers compare
            it once, and need not do so for each batch.
    """

    def __init__(
        self, batches: Iterable[Any], cluster: Cluster, counts: list | None = None
    ):
        self._batches = batches
        self._cluster = cluster
        self._counts = counts

    def __iter__(self) -> Iterator[Any]:
        """Starts to read.

        Raises:
            WorkerInputError: If the workers' batches differ in their numbers of rows,
                or another worker could not read its batch.
        """
        # Now, not when the first batch is asked for: to start may draw random numbers.
        return self._agreed(iter(self._batches))

    def _agreed(self, iterator: Iterator[Any]) -> Iterator[Any]:
        if self._counts is not None:
            told = self._cluster.agree("the start of an epoch", self._counts)
            if any(other != told[0] for other in told):
                raise WorkerInputError(
                    "All workers must be given the same arrays: each computes on its "
                    "own rows of every batch. Received arrays of other numbers of "
                    f"rows or batches: {self._cluster.listed(told)}."
                )
            yield from iterator
            return
        while True:
            batch, told = next_of_all(
                iterator, self._cluster, "the next batch", _rows_if_there
            )
            if None in told:
                self._warn(told)
                return
            if len(set(told)) > 1:
                raise WorkerInputError(
                    "All workers must be given the same batches: each computes on its "
                    "own rows of every batch. Received batches of different numbers "
                    f"of rows: {self._cluster.listed(told)}."
                )
            yield batch

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


def next_of_all(
    iterator: Iterator[Any],
    cluster: Cluster,
    operation: str,
    describe: Callable[[Any], Any],
) -> tuple[Any, list[Any]]:
    """Reads on, and learns what the other workers have read.

    Args:
        iterator: What this worker reads. It never gives None.
        cluster: The workers.
        operation: What they read, for messages.
        describe: Gives what the others are told of an item, of JSON's values but no
            dict; it is called with None at the end of the iterator.

    Returns:
        This worker's item, None at the end, and what each worker says, by rank.

    Raises:
        WorkerInputError: If another worker could not read its item. If this one could
            not, that error comes out as it is, after the others were told.
    """
    item = error = None
    try:
        item = next(iterator, None)
        said = describe(item)
    except Exception as caught:
        error, said = caught, {"error": f"{type(caught).__name__}: {caught}"}
    told = cluster.agree(operation, said)
    if error is not None:
        raise error
    for name, other in zip(cluster.names, told, strict=True):
        if isinstance(other, dict):
            raise WorkerInputError(
                f"'{name}' could not read {operation}: {other['error']}"
            )
    return item, told


def _rows_if_there(batch: Any) -> int | None:
    return None if batch is None else rows_of(batch)
