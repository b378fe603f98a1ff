"""Which part of the data a dataset gives, where it says so itself.

Libraries that read data have ways of their own to leave out what other processes read.
Nothing is taken for a worker's own part unless every worker's dataset says that it is.

What a dataset that several workers read holds: global batches, or a worker's own.

Each worker's share of a list of files.
"""

import glob
import logging
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from keras_strategy.cluster.membership import Cluster
from keras_strategy.core import context
from keras_strategy.data.sources import is_tf_dataset
from keras_strategy.options import AutoShardPolicy, InputContext

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


logger = logging.getLogger("keras_strategy")
# Where the batches of a step are those of all workers together.
_OWN = (AutoShardPolicy.OFF, AutoShardPolicy.FILE, AutoShardPolicy.HINT)


def resolve_policy(dataset: Any, options: Any, cluster: Cluster) -> AutoShardPolicy:
    """What was asked for: by options, or by what the dataset says of itself.

    Args:
        dataset: A dataset, or anything else.
        options: `InputOptions`, or None.
        cluster: The workers.

    Raises:
        ValueError: If the workers' datasets give shards that do not fit together.
    """
    if options is not None and options.auto_shard_policy is not AutoShardPolicy.AUTO:
        return options.auto_shard_policy
    if is_tf_dataset(dataset):
        policy = dataset.options().experimental_distribute.auto_shard_policy
        name = getattr(policy, "name", "AUTO")
        if name != "AUTO":
            return AutoShardPolicy[name]
    own = _distributed_sampler(dataset) is not None or is_presharded(dataset, cluster)
    return AutoShardPolicy.OFF if own else AutoShardPolicy.AUTO


def is_per_worker_policy(policy: AutoShardPolicy) -> bool:
    """Whether what each worker reads is its own."""
    return policy in _OWN


def shard_for_worker(dataset: Any, policy: AutoShardPolicy, cluster: Cluster) -> Any:
    """This worker's part of a dataset of which each has its own.

    Args:
        dataset: The dataset.
        policy: What was asked for.
        cluster: The workers.

    Raises:
        ValueError: If it cannot be sharded, or is sharded for others than the workers.
    """
    sampler = _distributed_sampler(dataset)
    if sampler is not None:
        _check_sampler(sampler, cluster)
    if policy is AutoShardPolicy.OFF:
        return dataset
    if not is_tf_dataset(dataset):
        raise ValueError(
            f"AutoShardPolicy.{policy.name} is for a `tf.data.Dataset`, which knows "
            "its files. Give each worker those of `keras_strategy.files(pattern)`, and "
            "take AutoShardPolicy.OFF. Received: dataset of type "
            f"{type(dataset).__name__}"
        )
    return _sharded(dataset, policy, cluster)


def _sharded(dataset: Any, policy: AutoShardPolicy, cluster: Cluster) -> Any:
    """A part of a `tf.data.Dataset`, as native tf.distribute makes it.

    Of the global batches it takes this worker's share of the rows.
    """
    tf: Any = sys.modules["tensorflow"]
    flat = tf.nest.flatten(dataset.element_spec)
    if not all(isinstance(spec, tf.TensorSpec) for spec in flat):
        raise ValueError(
            f"AutoShardPolicy.{policy.name} is for datasets of dense tensors. Shard "
            "this one with `dataset.shard`, and take AutoShardPolicy.OFF. Received: "
            f"element_spec={dataset.element_spec}"
        )
    layout: dict[str, Any] = {
        "output_types": [spec.dtype for spec in flat],
        "output_shapes": [spec.shape for spec in flat],
    }
    native = tf.data.experimental.AutoShardPolicy[policy.name]
    variant = tf.raw_ops.AutoShardDataset(
        input_dataset=tf.data.experimental.to_variant(dataset),
        num_workers=cluster.size,
        index=cluster.rank,
        auto_shard_policy=native.value,
        num_replicas=cluster.size,
        **layout,
    )
    # Batches of an unknown number of rows keep it.
    layout["output_shapes"] = [[None, *spec.shape[1:]] for spec in flat]
    variant = tf.raw_ops.RebatchDataset(
        input_dataset=variant, num_replicas=cluster.size, **layout
    )
    spec = tf.nest.map_structure(
        lambda spec: tf.TensorSpec([None, *spec.shape[1:]], spec.dtype),
        dataset.element_spec,
    )
    part = tf.data.experimental.from_variant(variant, spec)
    return part.filter(lambda *batch: tf.shape(tf.nest.flatten(batch)[0])[0] > 0)


def _distributed_sampler(loader: Any) -> Any:
    """The sampler by which a torch `DataLoader` reads its own rows, if it does."""
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is None or not isinstance(loader, torch_data.DataLoader):
        return None
    sampler = loader.sampler
    return sampler if isinstance(sampler, torch_data.DistributedSampler) else None


def _check_sampler(sampler: Any, cluster: Cluster) -> None:
    if (sampler.num_replicas, sampler.rank) != (cluster.size, cluster.rank):
        raise ValueError(
            f"A DistributedSampler must be made for the {cluster.size} workers, here "
            f"with `num_replicas={cluster.size}, rank={cluster.rank}`; the replicas of "
            "a worker share what it reads. Received: a sampler with "
            f"num_replicas={sampler.num_replicas}, rank={sampler.rank}"
        )
    repeated = -len(sampler.dataset) % cluster.size
    if repeated and not sampler.drop_last and not _said:
        _said.append(repeated)
        logger.warning(
            "A DistributedSampler pads %d rows for %d workers: %d of them train twice "
            "in each epoch, unlike on one device. Give `fit` a DataLoader of global "
            "batches with `shuffle=True` in its place: each worker reads its own rows "
            "of it alone, and none is repeated.",
            len(sampler.dataset),
            cluster.size,
            repeated,
        )


_said: list[int] = []


def files(
    pattern: str | Iterable[str], input_context: InputContext | None = None
) -> list[str]:
    """Returns the files that this worker is to read: every N-th of the sorted names.

    Args:
        pattern: What `glob.glob` takes, with `**` for all folders below, or the names.
        input_context: What a dataset function is given. Without one, the share is this
            worker's of the strategy in whose scope this is called.

    Raises:
        ValueError: If there are fewer files than workers: one would have nothing to
            read.

    Example:

    ```python
    import keras_strategy as ks

    context = ks.InputContext(num_input_pipelines=2, input_pipeline_id=1)
    assert ks.files(["c.csv", "a.csv", "b.csv"], context) == ["b.csv"]
    ```
    """
    by_pattern = isinstance(pattern, str)
    names = sorted(glob.glob(pattern, recursive=True) if by_pattern else pattern)
    if input_context is None:
        cluster = context.get_strategy().extended.cluster
        size, rank = (1, 0) if cluster is None else (cluster.size, cluster.rank)
    else:
        size = input_context.num_input_pipelines
        rank = input_context.input_pipeline_id
    if len(names) < size:
        raise ValueError(
            f"Each of the {size} workers must have a file or more to read. Received: "
            f"pattern={pattern!r}, of {len(names)} files"
        )
    return names[rank::size]
