"""Batches that several workers read for one step.

Either all workers read the same global batches and each computes its own rows, or each
worker reads its own data and the global batch is their concatenation by rank. That one
is never materialised: the workers exchange row counts only.

Before each step the workers agree that every one of them has a batch, since a worker
that stopped early would leave the others waiting. They exchange this one batch ahead,
so that the exchange overlaps with compute.
"""

import functools
import itertools
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from keras import tree

from keras_strategy.cluster.membership import Cluster
from keras_strategy.core.step_state import BatchRows, Bounds, LocalRows, map_rows
from keras_strategy.data.distributed_dataset import ReplicaParts
from keras_strategy.data.row_independence import is_declared_independent
from keras_strategy.data.sources.iterable import as_array
from keras_strategy.errors import WorkerInputError, WorkerReadError, logger
from keras_strategy.training import consistency
from keras_strategy.training.row_weights import rows_to_read, split_rows
from keras_strategy.training.train_step import count_rows

_SAME_ROWS = (
    "All workers read the same rows; with %d workers that trains each row %d times. "
    "Have each worker read a different part: `keras_strategy.InputContext` gives a "
    "dataset function the part's index (`input_pipeline_id`), and "
    "`keras_strategy.files` selects files. Or distribute the dataset with "
    "`AutoShardPolicy.DATA`, where all workers read global batches."
)
FULL_READS = (
    "Each of the %d workers reads all rows of this data and computes only some: every "
    "row is read %d times. If reading is slow, use rows that can be indexed "
    "(`keras_strategy.IndexedDataset`, or a torch DataLoader of them), of which a "
    "worker reads only its own. Rows may depend on each other if a `collate_fn`, "
    "`__getitems__` or `read` is yours, or if reading draws random numbers or changes "
    "the dataset: if they do not, declare it by `keras_strategy.row_independent(...)`. "
    "Or have each worker read a different part, with `AutoShardPolicy.OFF`, or FILE "
    "for a `tf.data.Dataset` of files."
)
_warned: set[str] = set()


def warn_once(cluster: Cluster | None, message: str) -> None:
    """Warn on the chief, if there are several workers."""
    if cluster is None or cluster.size == 1 or not cluster.is_chief:
        return
    if message not in _warned:
        _warned.add(message)
        logger.warning(message, cluster.size, cluster.size)


def _warn_if_same_rows(cluster: Cluster, digests: Sequence[str]) -> None:
    # Without a digest there are only dashes.
    found = {digest.strip("-") for digest in digests}
    if len(digests) == cluster.size and len(found) == 1 and found != {""}:
        warn_once(cluster, _SAME_ROWS)


@dataclass(frozen=True, eq=False)
class SynchronizedBatches:
    """Global batches, for as long as every worker has one."""

    batches: Iterable[Any]
    cluster: Cluster
    # See `read_synchronized`.
    pauses: Callable[[int], bool]
    warn_full_reads: bool

    def __iter__(self) -> Iterator[Any]:
        # Now rather than with the first batch: starting may draw random numbers.
        iterator = iter(self.batches)

        def describe(batch):
            """Return the number of rows, and digests of their order and values."""
            if batch is None:
                return None
            if isinstance(batch, LocalRows):
                return [batch.global_rows, str(batch.order_checksum), batch.digest]
            return [count_rows(batch), "", digest_of(batch)]

        return read_synchronized(
            iterator,
            self.cluster,
            "the next batch",
            describe,
            self._accept,
            self.pauses,
        )

    def _accept(self, batch: Any, answers: list) -> Any:
        if None in answers:
            self._warn_uneven_end(answers)
            return None
        rows, orders, digests = zip(*answers, strict=True)
        if len(set(rows)) > 1:
            raise WorkerInputError(
                "All workers must be given the same batches: each computes on its "
                "own rows of every batch. Received batches of different numbers "
                f"of rows: {self.cluster.format_by_worker(rows)}."
            )
        if len(set(orders)) > 1 or len(set(filter(None, digests))) > 1:
            received = self.cluster.format_by_value(" ".join(a[1:]) for a in answers)
            raise WorkerInputError(
                "All workers must be given the same batches, in the same order: each "
                "computes on its own rows of every batch. Received different rows or "
                f"values (digests by worker: {received}). If they are shuffled or "
                "drawn at random, a seed is missing: call "
                "`keras.utils.set_random_seed(...)` before the dataset is made, pass "
                "`shuffle(..., seed=...)` or the same generator to a sampler, and draw "
                "for row i from `np.random.default_rng([seed, i])`. If each worker may "
                "draw its own numbers, declare the dataset "
                "`keras_strategy.row_independent`. Use `AutoShardPolicy.OFF` only if "
                "each worker already has its own rows."
            )
        if self.warn_full_reads and not isinstance(batch, LocalRows):
            warn_once(self.cluster, FULL_READS)
        return batch

    def _warn_uneven_end(self, answers: list) -> None:
        by_name = zip(self.cluster.names, answers, strict=True)
        ended = [name for name, answer in by_name if answer is None]
        if len(ended) < len(answers):
            warnings.warn(
                f"The data of some workers ({', '.join(ended)}) has ended before that "
                "of the others; the epoch ends here on all workers.",
                stacklevel=2,
            )


@dataclass(frozen=True, eq=False)
class PerWorkerBatches:
    """A worker's own batches, as its rows of the global batches."""

    batches: Iterable[Any]
    cluster: Cluster
    num_local: int
    # After any multiple of so many batches, the next one is read only on request.
    pause: int | None
    # Whether batches may differ in their number of rows only.
    same_shapes: bool
    # Whether they end with those of the first worker, instead of those of the last.
    shortest: bool

    def as_read(self) -> Iterator[Any]:
        """Yield this worker's batches alone, while any worker has some."""
        return (rows.batch for rows in self)

    def __iter__(self) -> Iterator[LocalRows]:
        # Now rather than with the first batch: starting may draw random numbers.
        iterator = iter(self.batches)
        cluster, last = self.cluster, None

        def describe(batch):
            if batch is None:
                return "never" if last is None else "no more"
            layouts = [_layout(leaf, 1) for leaf in tree.flatten(batch)]
            digest = digest_of(batch) if last is None else ""
            return [count_rows(batch), digest, *layouts]

        def accept(batch, answers):
            nonlocal last
            present = [answer for answer in answers if isinstance(answer, list)]
            if not present:
                return None
            if "never" in answers:
                name = cluster.names[answers.index("never")]
                raise WorkerInputError(
                    f"The data of '{name}' has no batch, and that of other workers has "
                    "some. Every worker must have one or more."
                )
            if self.shortest and len(present) < len(answers):
                return None
            counts = [a[0] if isinstance(a, list) else 0 for a in answers]
            self._check(answers, present, counts)
            _warn_if_same_rows(cluster, [answer[1] for answer in present])
            last = batch = last if batch is None else batch
            first = sum(counts[: cluster.rank])
            bounds = [
                (first + begin, first + end)
                for begin, end in split_rows(counts[cluster.rank], self.num_local)
            ]
            return LocalRows(batch, bounds, sum(counts), worker_rows=tuple(counts))

        def pauses(num_taken):
            return self.pause is not None and num_taken % self.pause == 0

        return read_synchronized(
            iterator, cluster, "the next batch of its own", describe, accept, pauses
        )

    def _check(self, answers: list, present: list, counts: list[int]) -> None:
        if any(answer[0] == 0 for answer in present):
            raise WorkerInputError(
                "A batch must have 1 row or more. Received batches of these numbers of "
                f"rows: {self.cluster.format_by_worker(counts)}."
            )

        def comparable(leaf):
            """Return a leaf's layout, or only its rank and dtype."""
            if leaf is None or self.same_shapes:
                return leaf
            shape, dtype = leaf
            return [len(shape), dtype]

        first, *others = [list(map(comparable, answer[2:])) for answer in present]
        if any(other != first for other in others):
            by_worker = self.cluster.format_by_worker(a[2:] for a in answers)
            raise WorkerInputError(
                "The batches of all workers are concatenated by rows: they must be of "
                "one structure. Received arrays of these sizes, without the batch "
                f"dimension, and dtypes: {by_worker}."
            )


def read_synchronized(
    iterator: Iterator[Any],
    cluster: Cluster,
    operation: str,
    describe: Callable[[Any], Any],
    accept: Callable[[Any, list[Any]], Any],
    pauses: Callable[[int], bool],
) -> Iterator[Any]:
    """Read what all workers read, one item ahead."""
    # `describe` returns JSON values, but no dict, for an item, and for None at the end.
    # `accept` gets an item and all workers' descriptions, and returns the item to
    # yield, None at the end. `pauses` is True if after so many items the next one is
    # read only when it is requested, which it may never be.

    def read():
        """Read an item and start to exchange its description."""
        item = error = None
        try:
            item = next(iterator, None)
            description = describe(item)
        except Exception as caught:
            error = caught
            description = {"error": f"{type(caught).__name__}: {caught}"}
        return item, error, cluster.start_exchange(operation, description)

    pending = read()
    for num_taken in itertools.count(1):
        item, error, wait_for_answers = pending
        answers = wait_for_answers()
        if error is not None:
            raise error
        for name, answer in zip(cluster.names, answers, strict=True):
            if isinstance(answer, dict):
                raise WorkerReadError(
                    f"'{name}' could not read {operation}: {answer['error']}"
                )
        accepted = accept(item, answers)
        if accepted is None:
            return
        is_paused = pauses(num_taken)
        if not is_paused:
            pending = read()
        yield accepted
        if is_paused:
            pending = read()


def digest_of(batch: Any) -> str:
    """Return a digest of a batch's first rows: only dashes if there can be none."""
    leaves = tree.flatten(batch)
    return "-".join(consistency.rows_digest(leaf)[:8] for leaf in leaves)


def make_local_rows(
    batch: Any, rows: Any, bounds: Bounds, has_all: bool, source: Any
) -> LocalRows:
    """Return this worker's rows of a batch, of which it has read all or its own."""
    digest = ""
    if has_all:
        digest = "" if is_declared_independent(source) else digest_of(batch)
        first, end = rows_to_read(bounds)
        batch = map_rows(lambda leaf: leaf[first:end], batch)
    checksum = zlib.crc32(repr(list(rows)).encode())
    return LocalRows(batch, bounds, len(rows), checksum, digest=digest)


def synchronize_rounds(
    rounds: Iterator[ReplicaParts], cluster: Cluster, partial: bool
) -> Iterator[ReplicaParts]:
    """Yield a worker's elements for as long as any worker has some."""
    # A worker that has no more continues with empty elements, as replicas without an
    # element in a last round do. Unless elements may have fewer rows than others
    # (`partial`), such a round is dropped.
    empty = ReplicaParts()

    def describe(parts):
        if parts is not None:
            layouts = [[_layout(x) for x in tree.flatten(part)] for part in parts]
            return [layouts, "" if empty else digest_of(list(parts))]
        if not partial:
            return "none"
        return "empty" if empty else "never"

    def accept(parts, answers):
        nonlocal empty
        found = [answer for answer in answers if isinstance(answer, list)]
        if not found or "none" in answers:
            return None
        if "never" in answers:
            name = cluster.names[answers.index("never")]
            raise WorkerInputError(
                f"The dataset of '{name}' has no element, and those of other workers "
                "have some. Every worker's dataset must have one or more."
            )
        _warn_if_same_rows(cluster, [answer[1] for answer in found])
        if parts is None:
            parts = empty
        else:
            empty = ReplicaParts(
                tree.map_structure(_without_rows, part) for part in parts
            )
        first, *others = [part for answer in found for part in answer[0]]
        same = all(other == first for other in others)
        parts.alike = same and len(found) == len(answers)
        # The parts of a worker without an element count as an array without rows.
        no_rows = [[[[0]]]] * len(parts)
        layouts = [a[0] if isinstance(a, list) else no_rows for a in answers]
        shapes = [
            [None if leaf is None else leaf[0] for leaf in part]
            for worker in layouts
            for part in worker
        ]
        parts.rows = _rows_of_parts(shapes, cluster.rank * len(parts))
        return parts

    operation = "the next element of a distributed dataset"
    return read_synchronized(
        rounds, cluster, operation, describe, accept, pauses=lambda num_taken: True
    )


def assemble_rounds(
    iterators: Sequence[Iterator[Any]], partial: bool, argument: str
) -> Iterator[ReplicaParts]:
    """Yield rounds of elements, one of each replica's iterator; replicas may share one.

    In the last round there may be too few. The last replicas then get the first
    element without its rows. As in tf.distribute, the round is dropped instead if all
    elements have one shape (`partial` is False), or an array has no batch dimension.
    """
    missing = object()
    to_array = functools.partial(as_array, argument=argument)
    while True:
        elements = [next(iterator, missing) for iterator in iterators]
        elements = [
            e if e is missing else tree.map_structure(to_array, e) for e in elements
        ]
        present = [element for element in elements if element is not missing]
        if not present:
            return
        for element in present[1:]:
            try:
                tree.assert_same_structure(present[0], element)
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"{argument} must give elements of one structure. Received "
                    f"elements of different ones: {error}"
                ) from error
        if len(present) < len(elements):
            arrays = [leaf for leaf in tree.flatten(present[0]) if leaf is not None]
            if not partial or any(len(leaf.shape) == 0 for leaf in arrays):
                return
        empty = tree.map_structure(_without_rows, present[0])
        parts = ReplicaParts(empty if e is missing else e for e in elements)
        shapes = [
            [None if leaf is None else tuple(leaf.shape) for leaf in tree.flatten(part)]
            for part in parts
        ]
        parts.rows = _rows_of_parts(shapes)
        yield parts


def _rows_of_parts(
    parts: Sequence[Sequence[Sequence[int] | None]], first: int = 0
) -> BatchRows | None:
    """Return the rows of an element from the shapes of each replica's arrays."""
    # `first` is the index of this worker's first replica. The result is None if the
    # arrays of a part differ in their number of rows, or have none.
    counts, result = [], BatchRows()
    for shapes in parts:
        rows = {shape[0] if shape else None for shape in shapes if shape is not None}
        if len(rows) != 1 or None in rows:
            return None
        counts.append(rows.pop())
    result.counts, result.first = tuple(counts), first
    return result


def _layout(leaf: Any, first_dim: int = 0) -> list[Any] | None:
    """Return the shape, from `first_dim` on, and dtype as JSON values."""
    return None if leaf is None else [list(leaf.shape)[first_dim:], str(leaf.dtype)]


def _without_rows(leaf: Any) -> Any:
    return None if leaf is None or len(leaf.shape) == 0 else leaf[:0]
