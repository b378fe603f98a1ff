"""Which part of the data a dataset gives, where it says so itself.

Libraries that read data have ways of their own to leave out what other processes read.
Nothing is taken for a worker's own part unless every worker's dataset says that it is.
"""

import sys
from collections.abc import Iterator
from typing import Any

from keras_strategy.input.sources import is_tf_dataset
from keras_strategy.workers.cluster import Cluster

# How many shards there are, and which of them a dataset gives.
Shard = list[int]


def is_presharded(dataset: Any, cluster: Cluster) -> bool:
    """Whether each worker's dataset says that it gives that worker's shard alone.

    Args:
        dataset: Anything. Known are `tf.data.Dataset.shard`, grain's `ShardOptions`
            and slices, and what `datasets.distributed.split_dataset_by_node` makes of
            a stream.
        cluster: The workers.

    Raises:
        ValueError: If the workers' datasets give different shards, and not each its
            own.
    """
    shards = list(declared_shards(dataset))
    if not shards:
        return False
    told = cluster.exchange("the shards that a dataset gives", shards)
    if all(other == shards for other in told):
        return False  # they read the same
    for position in range(min(map(len, told))):
        if [said[position] for said in told] == [
            [cluster.size, rank] for rank in range(cluster.size)
        ]:
            return True
    raise ValueError(
        f"The dataset of worker r must give shard r of {cluster.size}, or that of all "
        "workers the same rows. Received datasets of these shards (how many there are, "
        f"and which it is): {cluster.format_by_worker(told)}."
    )


def declared_shards(dataset: Any) -> Iterator[Shard]:
    """The shards that a dataset says it gives, those last applied first."""
    if is_tf_dataset(dataset):
        yield from _of_tf(dataset)
        return
    options = None
    grain = sys.modules.get("grain")
    if grain is not None and isinstance(dataset, grain.DataLoader):
        options = getattr(dataset, "_shard_options", None)
    if options is not None and options.shard_count > 1:
        yield [options.shard_count, options.shard_index]
    if grain is not None and isinstance(dataset, grain.MapDataset | grain.IterDataset):
        yield from _of_grain(dataset)
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and isinstance(dataset, torch_data.DataLoader):
        dataset = dataset.dataset
    hugging_face = sys.modules.get("datasets")
    if hugging_face is not None and isinstance(dataset, hugging_face.IterableDataset):
        split = getattr(dataset, "_distributed", None)
        if split is not None:
            yield [split.world_size, split.rank]


def _of_tf(dataset: Any) -> Iterator[Shard]:
    if type(dataset).__name__ == "_ShardDataset":
        shard = [int(dataset._num_shards), int(dataset._index)]
        if min(shard) >= 0:  # or it is a hint
            yield shard
    for source in dataset._inputs():
        yield from _of_tf(source)


def _of_grain(dataset: Any) -> Iterator[Shard]:
    if type(dataset).__name__ == "SliceMapDataset" and dataset._step > 1:
        yield [dataset._step, dataset._start]
    for source in getattr(dataset, "_parents", ()):
        yield from _of_grain(source)
