"""Workers that read datasets of their own, and make each step together."""

from collections.abc import Iterator, Sequence
from typing import Any

from keras import tree

from keras_strategy.core.row_range import BatchRows
from keras_strategy.errors import WorkerInputError
from keras_strategy.input import notices
from keras_strategy.input.agreement import digest_of, read_next
from keras_strategy.input.parts import ReplicaParts
from keras_strategy.input.sources import as_array
from keras_strategy.workers.cluster import Cluster


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
            notices.warn_if_same_rows(cluster, [said[1] for said in told])
        if parts is None:
            parts = empty
        else:
            empty = ReplicaParts(tree.map_structure(without_rows, part) for part in parts)
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
