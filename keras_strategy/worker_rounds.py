"""Workers that read datasets of their own, and make each step together."""

from collections.abc import Iterator
from typing import Any

from keras import tree

from keras_strategy.cluster import Cluster
from keras_strategy.datasets import Parts
from keras_strategy.errors import WorkerInputError


def agreed_rounds(
    rounds: Iterator[Parts], cluster: Cluster, partial: bool
) -> Iterator[Parts]:
    """Gives a worker's elements for as long as any worker has some.

    A worker that has none left goes on without rows, as its replicas do that find none
    in a last round. Where all elements have one shape, such a round is dropped.

    Args:
        rounds: What this worker's replicas get, step by step.
        cluster: The workers.
        partial: Whether elements may have fewer rows than others.

    Raises:
        WorkerInputError: If one worker has nothing at all, of which nobody knows the
            shapes.
    """
    empty: Parts = []
    while True:
        parts = next(rounds, None)
        if parts is not None:
            said = "one"
        elif not partial:
            said = "none"
        else:
            said = "empty" if empty else "never"
        told = cluster.agree("the next element of a distributed dataset", said)
        if "one" not in told or "none" in told:
            return
        if "never" in told:
            name = cluster.names[told.index("never")]
            raise WorkerInputError(
                f"The dataset of '{name}' has no element, and those of other workers "
                "have some. Every worker's dataset must have one or more."
            )
        if parts is not None:
            empty = [tree.map_structure(without_rows, part) for part in parts]
        yield empty if parts is None else parts


def without_rows(leaf: Any) -> Any:
    """An array without its rows; what has none stays what it is."""
    return None if leaf is None or len(leaf.shape) == 0 else leaf[:0]
