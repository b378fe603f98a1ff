"""tf.distribute's ParameterServerStrategy, for this package's cluster resolvers."""

from typing import Any

import tensorflow as tf


class ParameterServerStrategy(tf.distribute.ParameterServerStrategy):
    """tf.distribute's own, for loops of one's own with a `ClusterCoordinator`.

    Args:
        cluster_resolver: A `ClusterResolver` of this package or of tf.distribute.
        variable_partitioner: Tells into how many shards a variable is divided, such as
            `keras_strategy.experimental.partitioners.FixedShardsPartitioner(2)`.
    """

    def __init__(self, cluster_resolver: Any, variable_partitioner: Any = None):
        super().__init__(_native(cluster_resolver), variable_partitioner)


def _native(resolver: Any) -> Any:
    if isinstance(resolver, tf.distribute.cluster_resolver.ClusterResolver):
        return resolver
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(resolver.cluster_spec().as_dict()),
        task_type=resolver.task_type,
        task_id=resolver.task_id,
        rpc_layer=resolver.rpc_layer or "grpc",
    )
