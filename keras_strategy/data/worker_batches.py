"""What workers are told, once, of how they read their data.

The batches of `fit` and its like, where several workers read them.

Every worker reads the same global batches and computes on its own rows of them. Before
a step they agree that there is one: a worker that has no batch left would leave the
others waiting. They tell it one batch ahead, so that nobody waits for it while a step
could compute.

Workers that read data of their own for `fit` and its like.

The global batch of a step is what the workers read for it, joined in their order.
Nobody has it: all that travels is how many rows each worker has. That is told one batch
ahead, so that nobody waits for it while a step could compute.

Workers that read datasets of their own, and make each step together.
"""

import itertools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
from keras import tree

from keras_strategy.cluster.membership import Cluster
from keras_strategy.core.step_state import BatchRows
from keras_strategy.data.local_rows import LocalRows, ReplicaParts
from keras_strategy.data.sources import as_array
from keras_strategy.errors import WorkerInputError, WorkerReadError
from keras_strategy.training import consistency
from keras_strategy.training.row_weights import split_rows
from keras_strategy.training.train_step import count_rows

logger = logging.getLogger("keras_strategy")

_SAME_ROWS = (
    "All workers read the same rows; with %d workers that trains each row %d times. "
    "Have each read a part of its own: `keras_strategy.InputContext` tells a dataset "
    "function which (`input_pipeline_id`), and `keras_strategy.files` shares files. Or "
    "distribute the dataset with `AutoShardPolicy.DATA`, where all read global batches."
)
_OTHER_ROWS = (
    "The data of the %d workers differs: a row that all of them have read is another "
    "one on some, and holds random numbers. Each reads 1/%d of the rows of its own "
    "data, as if all had the same. To compute what one device does, draw for row i "
    "from a generator of its own, such as `np.random.default_rng([seed, i])`."
)
_READ_BY_ALL = (
    "Each of the %d workers reads all rows of this data and computes on its own: it is "
    "read %d times. Where reading is slow, give rows that can be indexed "
    "(`keras_strategy.IndexedDataset`, or a torch DataLoader of them), of which a "
    "worker reads its own alone, or have each worker read a part of its own, with "
    "`AutoShardPolicy.OFF`, or FILE for a `tf.data.Dataset` of files."
)


def warn_if_same_rows(cluster: Cluster, digests: Sequence[str]) -> None:
    """Warns of workers that should read rows of their own, and read the same.

    Args:
        cluster: The workers.
        digests: Of each worker's first batch; empty where there is none.
    """
    if cluster.size > 1 and len(set(digests)) == 1 and digests[0].strip("-"):
        _say(cluster, _SAME_ROWS)


def warn_if_rows_differ(cluster: Cluster) -> None:
    """Warns of workers that read rows of a common source, which is not the same."""
    _say(cluster, _OTHER_ROWS)


def warn_full_reads(cluster: Cluster) -> None:
    """Says what it costs that each worker reads whole batches."""
    if cluster.size > 1:
        _say(cluster, _READ_BY_ALL)


def _say(cluster: Cluster, message: str) -> None:
    if cluster.is_chief and message not in _said:
        _said.add(message)
        logger.warning(message, cluster.size, cluster.size)


_said: set[str] = set()


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
                    warn_full_reads(self._cluster)
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
        warn_if_rows_differ(self._cluster)

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
    return "-".join((consistency.rows_fingerprint(leaf) or "")[:8] for leaf in leaves)


def _rows_if_there(batch: Any) -> list | None:
    if batch is None:
        return None
    if isinstance(batch, LocalRows):
        return [batch.global_rows, str(batch.order_checksum), batch.digest]
    return [count_rows(batch), ""]


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
                return [
                    count_rows(batch),
                    digest,
                    *map(_row_layout, tree.flatten(batch)),
                ]
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
                warn_if_same_rows(cluster, [said[1] for said in there])
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


def synchronize_rounds(
    rounds: Iterator[ReplicaParts], cluster: Cluster, partial: bool
) -> Iterator[ReplicaParts]:
    """Gives a worker's elements for as long as any worker has some.

    A worker that has none left goes on without rows, as its replicas do that find none
    in a last round. Where all elements have one shape, such a round is dropped.

    Args:
        rounds: What this worker's replicas get, step by step.
        cluster: The workers.
        partial: Whether elements may have fewer rows than others.

    Raises:
        WorkerInputError: If another worker could not read its element, or one has
            nothing at all, of which nobody knows the shapes.
    """
    empty = ReplicaParts()

    def layouts(parts: ReplicaParts | None) -> Any:
        if parts is not None:
            layouts = [[_layout(x) for x in tree.flatten(part)] for part in parts]
            return [layouts, "" if empty else digest_of(list(parts))]
        if not partial:
            return "none"
        return "empty" if empty else "never"

    while True:
        parts, told = read_next(
            rounds, cluster, "the next element of a distributed dataset", layouts
        )
        there = [said[0] for said in told if isinstance(said, list)]
        if not there or "none" in told:
            return
        if "never" in told:
            name = cluster.names[told.index("never")]
            raise WorkerInputError(
                f"The dataset of '{name}' has no element, and those of other workers "
                "have some. Every worker's dataset must have one or more."
            )
        if not empty:
            warn_if_same_rows(cluster, [said[1] for said in told])
        if parts is None:
            parts = empty
        else:
            empty = ReplicaParts(
                tree.map_structure(without_rows, part) for part in parts
            )
        first, *others = [part for said in there for part in said]
        same = all(other == first for other in others)
        parts.alike = same and len(there) == len(told)
        none = [[[[0]]]] * len(parts)
        shapes = [
            [None if leaf is None else leaf[0] for leaf in part]
            for said in told
            for part in (said[0] if isinstance(said, list) else none)
        ]
        parts.rows = rows_of_parts(shapes, cluster.rank * len(parts))
        yield parts


def assemble_rounds(
    iterators: Sequence[Iterator[Any]], partial: bool, argument: str
) -> Iterator[ReplicaParts]:
    """The elements that the replicas take in turn.

    In the last round there may be too few. The replicas that come last then get the
    element of the first without its rows; tf.distribute drops such a round where all
    elements have one shape (`partial` is False), and so does this where an element
    has no rows to leave out.

    Args:
        iterators: Whose element each replica takes; one of them may stand for several.
        partial: Whether elements may have fewer rows than others.
        argument: What the dataset is called in errors.
    """
    missing = object()
    while True:
        elements = [next(iterator, missing) for iterator in iterators]
        there = [element for element in elements if element is not missing]
        if not there:
            return
        there = [
            tree.map_structure(lambda leaf: as_array(leaf, argument), element)
            for element in there
        ]
        for element in there[1:]:
            _require_same_structure(there[0], element, argument)
        if len(there) < len(elements):
            arrays = [leaf for leaf in tree.flatten(there[0]) if leaf is not None]
            if not partial or any(len(leaf.shape) == 0 for leaf in arrays):
                return
        empty = tree.map_structure(without_rows, there[0])
        real = iter(there)
        parts = ReplicaParts(empty if e is missing else next(real) for e in elements)
        shapes = [[shape_of(leaf) for leaf in tree.flatten(part)] for part in parts]
        parts.rows = rows_of_parts(shapes)
        yield parts


def rows_of_parts(
    parts: Sequence[Sequence[Sequence[int] | None]], first: int = 0
) -> BatchRows | None:
    """The rows of an element, given the shapes of the arrays of each replica's part.

    Args:
        parts: For each replica, the shapes; None where there is no array.
        first: The number of this worker's first replica.

    Returns:
        The rows; None if the arrays of a part differ in their number, or have none.
    """
    counts, result = [], BatchRows()
    for shapes in parts:
        rows = {shape[0] if shape else None for shape in shapes if shape is not None}
        if len(rows) != 1 or None in rows:
            return None
        counts.append(rows.pop())
    result.counts, result.first = tuple(counts), first
    return result


def shape_of(leaf: Any) -> tuple[int, ...] | None:
    """The shape of an array; None where there is none."""
    return None if leaf is None else tuple(leaf.shape)


def _layout(leaf: Any) -> list[Any] | None:
    return None if leaf is None else [list(leaf.shape), str(leaf.dtype)]


def without_rows(leaf: Any) -> Any:
    """An array without its rows; what has none stays what it is."""
    return None if leaf is None or len(leaf.shape) == 0 else leaf[:0]


def _require_same_structure(first: Any, other: Any, argument: str) -> None:
    try:
        tree.assert_same_structure(first, other)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{argument} must give elements of one structure. Received elements of "
            f"different ones: {error}"
        ) from error
