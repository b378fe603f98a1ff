"""What a dataset that several workers read holds: global batches, or a worker's own."""

import logging
import sys
from typing import Any

from keras_strategy.input.shards import is_presharded
from keras_strategy.input.sources import is_tf_dataset
from keras_strategy.options.input import AutoShardPolicy
from keras_strategy.workers.cluster import Cluster

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
