"""Workers that read data of their own for `fit` and its like.

The global batch of a step is what the workers read for it, joined in their order.
Nobody has it: all that travels is how many rows each worker has. That is told one batch
ahead, so that nobody waits for it while a step could compute.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from keras import tree

from keras_strategy.errors import WorkerInputError
from keras_strategy.input import notices
from keras_strategy.input.agreement import digest_of, read_synchronized
from keras_strategy.input.own_rows import LocalRows
from keras_strategy.rules.row_weights import split_rows
from keras_strategy.rules.step import count_rows
from keras_strategy.workers.cluster import Cluster


class PerWorkerBatches:
    """A worker's batches, as parts of those that all workers' make together.

    They end when those of all workers have ended, if not told otherwise.

    Args:
        batches: The worker's batches; read anew for each `iter`.
        cluster: The workers.
        local: The number of this worker's replicas.
        pause: After so many batches, or any multiple, the next one is not read before
            it is asked for; None if only the end of the data ends an epoch.
        same_shapes: Whether the workers' batches must differ in rows alone. Where each
            worker computes of its own, the other dimensions need not be the same.
        shortest: Whether they end when those of the first worker have ended.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        cluster: Cluster,
        local: int,
        pause: int | None,
        same_shapes: bool,
        shortest: bool = False,
    ):
        self._batches = batches
        self._cluster = cluster
        self._local = local
        self._pause = pause
        self._same_shapes = same_shapes
        self._shortest = shortest

    def __iter__(self) -> Iterator[LocalRows]:
        """Starts to read.

        Raises:
            WorkerInputError: If the batches of the workers cannot be joined, another
                worker could not read its batch, or has none at all.
        """
        # Now, not when the first batch is asked for: to start may draw random numbers.
        return self._joined(iter(self._batches))

    def as_read(self) -> Iterator[Any]:
        """The worker's batches alone, while a worker has some."""
        return (own.batch for own in self)

    def _joined(self, iterator: Iterator[Any]) -> Iterator[LocalRows]:
        cluster, last = self._cluster, None

        def describe(batch):
            if batch is not None:
                digest = digest_of(batch) if last is None else ""
                return [count_rows(batch), digest, *map(_row_layout, tree.flatten(batch))]
            return "never" if last is None else "no more"

        def accept(batch, told):
            nonlocal last
            there = [said for said in told if isinstance(said, list)]
            if not there:
                return None
            if "never" in told:
                name = cluster.names[told.index("never")]
                raise WorkerInputError(
                    f"The data of '{name}' has no batch, and that of other workers has "
                    "some. Every worker must have one or more."
                )
            if self._shortest and len(there) < len(told):
                return None
            counts = [said[0] if isinstance(said, list) else 0 for said in told]
            self._check(told, there, counts)
            if last is None:
                notices.warn_if_same_rows(cluster, [said[1] for said in there])
            last = batch = last if batch is None else batch
            first = sum(counts[: cluster.rank])
            bounds = [
                (first + begin, first + end)
                for begin, end in split_rows(counts[cluster.rank], self._local)
            ]
            return LocalRows(batch, bounds, sum(counts), worker_rows=tuple(counts))

        name = "the next batch of its own"

        def pauses(taken):
            return self._pause is not None and taken % self._pause == 0

        return read_synchronized(iterator, cluster, name, describe, accept, pauses)

    def _check(self, told: list, there: list, counts: list[int]) -> None:
        if 0 in [said[0] for said in there]:
            raise WorkerInputError(
                "A batch must have 1 row or more. Received batches of these numbers of "
                f"rows: {self._cluster.format_by_worker(counts)}."
            )
        layouts = [
            [leaf and [leaf[0] if self._same_shapes else len(leaf[0]), leaf[1]]]
            for said in there
            for leaf in said[2:]
        ]
        arrays = len(there[0]) - 2
        if any(len(said) - 2 != arrays for said in there) or any(
            layout != layouts[i % arrays] for i, layout in enumerate(layouts)
        ):
            raise WorkerInputError(
                "The batches of all workers are joined, row by row: they must be of "
                "one structure. Received arrays of these sizes, beside the rows, and "
                f"dtypes: {self._cluster.format_by_worker(said[2:] for said in told)}."
            )


def _row_layout(leaf: Any) -> list[Any] | None:
    return None if leaf is None else [list(leaf.shape)[1:], str(leaf.dtype)]
