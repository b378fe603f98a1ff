"""How many batches are read before they are asked for, and how far they get."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from keras_strategy.input.indexed import IndexedDataset
from keras_strategy.input.positions import has_state
from keras_strategy.input.sources import OneShotStart
from keras_strategy.options.input import InputOptions

if TYPE_CHECKING:
    from keras_strategy.core.strategy import Strategy


def prefetch_depth(dataset: Any, options: InputOptions | None) -> int:
    """How many batches of a dataset are read before they are asked for.

    An `IndexedDataset` says it, whose rows are the same whenever they are read. Of what
    is read by Python code of which nothing is known, none unless options say so. What
    is not counted here reads ahead by itself: `tf.data`, and loaders with threads or
    processes of their own. And arrays need not be read.

    Args:
        dataset: The dataset.
        options: What was asked for.
    """
    if isinstance(dataset, IndexedDataset):
        return dataset.prefetch
    return 0 if options is None else options.experimental_per_replica_buffer_size


def hoist_one_shot_prefetch(starts: Sequence[Any], datasets: Sequence[Any], depth: int) -> int:
    """Has what is read once be read ahead for all that read it, and returns 0 then.

    What says where it is is left to itself: iterators that do read ahead themselves.
    """
    pairs = zip(starts, datasets, strict=True)
    once = [(start, data) for start, data in pairs if isinstance(start, OneShotStart)]
    for start, dataset in once:
        if depth and not has_state(dataset):
            start.read_ahead(depth)
    return 0 if once else depth


def prefetches_to_devices(strategy: "Strategy", options: InputOptions | None) -> bool:
    """Whether what is read ahead is on the devices, too.

    Several workers first agree that all of them have a batch.

    Args:
        strategy: The strategy.
        options: What was asked for.
    """
    return strategy.extended.cluster is None and (
        options is None or options.experimental_fetch_to_device
    )
