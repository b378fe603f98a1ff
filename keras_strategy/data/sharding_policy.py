"""Decision whether workers share global batches, or each reads its own shard.

Options decide, or what a dataset declares about itself: libraries have their own ways
to skip what other processes read. A dataset counts as a worker's shard only if every
worker's dataset declares that.
"""

import glob
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from keras_strategy.cluster.membership import Cluster
from keras_strategy.core import context
from keras_strategy.data.sources import is_tf_dataset
from keras_strategy.errors import logger
from keras_strategy.options import AutoShardPolicy, InputContext

# The number of shards, and the index of the one that a dataset gives.
Shard = list[int]
_warned_padding = False


def files(
    pattern: str | Iterable[str], input_context: InputContext | None = None
) -> list[str]:
    """Return the files that this worker is to read: every N-th of the sorted names.

    Args:
        pattern: A pattern for `glob.glob`, with `**` for all directories below, or the
            names themselves.
        input_context: The argument of a dataset function. Without one, the files are
            those for this worker in the current strategy.

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
            f"Each of the {size} workers must have at least one file to read. "
            f"Received: pattern={pattern!r}, of {len(names)} files"
        )
    return names[rank::size]


def per_worker_policy(
    dataset: Any, options: Any, cluster: Cluster
) -> AutoShardPolicy | None:
    """Return the policy that options request, or that the dataset declares."""
    # None for a policy by which the workers share global batches.
    policy = AutoShardPolicy.AUTO if options is None else options.auto_shard_policy
    if policy is AutoShardPolicy.AUTO and is_tf_dataset(dataset):
        native = dataset.options().experimental_distribute.auto_shard_policy
        policy = AutoShardPolicy[getattr(native, "name", "AUTO")]
    if policy is AutoShardPolicy.AUTO and (
        _distributed_sampler(dataset) is not None or is_presharded(dataset, cluster)
    ):
        return AutoShardPolicy.OFF
    # Else a global batch is the concatenation of all workers' batches.
    is_shared = policy in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA)
    return None if is_shared else policy


def shard_for_worker(dataset: Any, policy: AutoShardPolicy, cluster: Cluster) -> Any:
    """Return this worker's shard of a dataset under a per-worker policy."""
    sampler = _distributed_sampler(dataset)
    if sampler is not None:
        _check_sampler(sampler, cluster)
    if policy is AutoShardPolicy.OFF:
        return dataset
    if not is_tf_dataset(dataset):
        raise ValueError(
            f"AutoShardPolicy.{policy.name} is for a `tf.data.Dataset`, whose files "
            "are known. Have each worker read `keras_strategy.files(pattern)`, and use "
            f"AutoShardPolicy.OFF. Received: dataset of type {type(dataset).__name__}"
        )
    return _shard_tf_dataset(dataset, policy, cluster)


def _shard_tf_dataset(dataset: Any, policy: AutoShardPolicy, cluster: Cluster) -> Any:
    """Shard a `tf.data.Dataset` of global batches as native tf.distribute does."""
    tf: Any = sys.modules["tensorflow"]
    flat = tf.nest.flatten(dataset.element_spec)
    if not all(isinstance(spec, tf.TensorSpec) for spec in flat):
        raise ValueError(
            f"AutoShardPolicy.{policy.name} is for datasets of dense tensors. Shard "
            "this one with `dataset.shard`, and use AutoShardPolicy.OFF. Received: "
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
    shard = tf.data.experimental.from_variant(variant, spec)
    return shard.filter(lambda *batch: tf.shape(tf.nest.flatten(batch)[0])[0] > 0)


def _distributed_sampler(loader: Any) -> Any:
    """Return a torch `DataLoader`'s `DistributedSampler`, or None."""
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is None or not isinstance(loader, torch_data.DataLoader):
        return None
    sampler = loader.sampler
    return sampler if isinstance(sampler, torch_data.DistributedSampler) else None


def _check_sampler(sampler: Any, cluster: Cluster) -> None:
    global _warned_padding
    if (sampler.num_replicas, sampler.rank) != (cluster.size, cluster.rank):
        raise ValueError(
            f"A DistributedSampler must be made for the {cluster.size} workers, here "
            f"with `num_replicas={cluster.size}, rank={cluster.rank}`; the replicas of "
            "a worker share what it reads. Received: a sampler with "
            f"num_replicas={sampler.num_replicas}, rank={sampler.rank}"
        )
    repeated = -len(sampler.dataset) % cluster.size
    if repeated and not sampler.drop_last and not _warned_padding:
        _warned_padding = True
        logger.warning(
            "A DistributedSampler pads %d rows for %d workers: %d of them train twice "
            "in each epoch, unlike on one device. Pass `fit` a DataLoader of global "
            "batches with `shuffle=True` instead: each worker reads only its own rows "
            "of it, and none is repeated.",
            len(sampler.dataset),
            cluster.size,
            repeated,
        )


def is_presharded(dataset: Any, cluster: Cluster) -> bool:
    """Return True if each worker's dataset declares that it is this worker's shard."""
    shards = list(declared_shards(dataset))
    if not shards:
        return False
    by_worker = cluster.exchange("the shards that a dataset gives", shards)
    if all(other == shards for other in by_worker):
        return False  # all read the same
    expected = tuple([cluster.size, rank] for rank in range(cluster.size))
    if expected in zip(*by_worker, strict=False):
        return True
    raise ValueError(
        f"The dataset of worker r must give shard r of {cluster.size}, or that of all "
        "workers the same rows. Received datasets of these shards (number of shards, "
        f"index): {cluster.format_by_worker(by_worker)}."
    )


def declared_shards(dataset: Any) -> Iterator[Shard]:
    """Yield the shards that a dataset declares, the last applied first."""
    if is_tf_dataset(dataset):
        yield from _tf_shards(dataset)
        return
    grain = sys.modules.get("grain")
    if grain is not None and isinstance(dataset, grain.DataLoader):
        options = getattr(dataset, "_shard_options", None)
        if options is not None and options.shard_count > 1:
            yield [options.shard_count, options.shard_index]
    if grain is not None and isinstance(dataset, grain.MapDataset | grain.IterDataset):
        yield from _grain_shards(dataset)
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and isinstance(dataset, torch_data.DataLoader):
        dataset = dataset.dataset
    hugging_face = sys.modules.get("datasets")
    if hugging_face is not None and isinstance(dataset, hugging_face.IterableDataset):
        split = getattr(dataset, "_distributed", None)
        if split is not None:
            yield [split.world_size, split.rank]


def _tf_shards(dataset: Any) -> Iterator[Shard]:
    if type(dataset).__name__ == "_ShardDataset":
        shard = [int(dataset._num_shards), int(dataset._index)]
        if min(shard) >= 0:  # negative: a hint
            yield shard
    for source in dataset._inputs():
        yield from _tf_shards(source)


def _grain_shards(dataset: Any) -> Iterator[Shard]:
    if type(dataset).__name__ == "SliceMapDataset" and dataset._step > 1:
        yield [dataset._step, dataset._start]
    for source in getattr(dataset, "_parents", ()):
        yield from _grain_shards(source)
