"""Workers that read datasets of their own, and make each step together."""

from collections.abc import Iterator
from typing import Any

import keras
from keras import tree

from keras_strategy.errors import WorkerInputError
from keras_strategy.input.agreement import next_of_all
from keras_strategy.input.dataset import Parts
from keras_strategy.input.sources import as_array, is_tf_dataset
from keras_strategy.options.input import AutoShardPolicy
from keras_strategy.workers.cluster import Cluster


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
        WorkerInputError: If another worker could not read its element, or one has
            nothing at all, of which nobody knows the shapes.
    """
    empty = Parts()

    def layouts(parts: Parts | None) -> Any:
        if parts is not None:
            return [[_layout(leaf) for leaf in tree.flatten(part)] for part in parts]
        if not partial:
            return "none"
        return "empty" if empty else "never"

    while True:
        parts, told = next_of_all(
            rounds, cluster, "the next element of a distributed dataset", layouts
        )
        there = [said for said in told if isinstance(said, list)]
        if not there or "none" in told:
            return
        if "never" in told:
            name = cluster.names[told.index("never")]
            raise WorkerInputError(
                f"The dataset of '{name}' has no element, and those of other workers "
                "have some. Every worker's dataset must have one or more."
            )
        if parts is None:
            parts = empty
        else:
            empty = Parts(tree.map_structure(without_rows, part) for part in parts)
        first, *others = [part for said in there for part in said]
        same = all(other == first for other in others)
        parts.alike = same and len(there) == len(told)
        yield parts


def is_own_rows(dataset: Any, options: Any) -> bool:
    """Whether each worker's dataset holds its own rows: the policy OFF.

    Args:
        dataset: A dataset, or anything else.
        options: `InputOptions`, or None.
    """
    if options is not None and options.auto_shard_policy is AutoShardPolicy.OFF:
        return True
    if not is_tf_dataset(dataset):
        return False
    own = dataset.options().experimental_distribute.auto_shard_policy
    return getattr(own, "name", "") == "OFF"


def whole_batches(
    own: Iterator[Any], strategy: Any, cluster: Cluster, argument: str
) -> Iterator[Any]:
    """The global batches of which each worker has its own rows.

    Args:
        own: This worker's batches.
        strategy: The strategy.
        cluster: Its workers.
        argument: What the dataset is called in errors.
    """
    group = strategy.extended.group

    def whole(leaf):
        if leaf is None:
            return None
        rows = keras.ops.convert_to_tensor(leaf)
        return keras.ops.convert_to_numpy(group.gather([rows], 0))

    arrays = (
        Parts([tree.map_structure(lambda leaf: as_array(leaf, argument), batch)])
        for batch in own
    )
    for (batch,) in agreed_rounds(arrays, cluster, True):
        with strategy.scope():
            yield tree.map_structure(whole, batch)


def _layout(leaf: Any) -> list[Any] | None:
    return None if leaf is None else [list(leaf.shape), str(leaf.dtype)]


def without_rows(leaf: Any) -> Any:
    """An array without its rows; what has none stays what it is."""
    return None if leaf is None or len(leaf.shape) == 0 else leaf[:0]
