"""tf.distribute's ParameterServerStrategy, for this package's cluster resolvers."""

from typing import Any

import tensorflow as tf

from keras_strategy.backends.tensorflow.shards import ExtendedOfShards
from keras_strategy.values.distributed import ReduceOp


class ParameterServerStrategy(tf.distribute.ParameterServerStrategy):
    """tf.distribute's own, for loops of one's own with a `ClusterCoordinator`.

    Args:
        cluster_resolver: A `ClusterResolver` of this package or of tf.distribute.
        variable_partitioner: Tells into how many shards a variable is divided, such as
            `keras_strategy.experimental.partitioners.FixedShardsPartitioner(2)`.
    """

    def __init__(self, cluster_resolver: Any, variable_partitioner: Any = None):
        resolver = _native(cluster_resolver)
        super().__init__(resolver, variable_partitioner)
        # In the place of native's, which makes shards that Keras cannot train.
        extended = ExtendedOfShards(self, resolver, variable_partitioner)
        tf.distribute.Strategy.__init__(self, extended)
        self._should_use_with_coordinator = True

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None):
        """See tf.distribute's; what Keras cannot do in it is said here."""
        try:
            return super().run(fn, args, kwargs, options)
        except RuntimeError as error:
            # TensorFlow's, from inside a tf.cond.
            if "`merge_call` called while defining" not in str(error):
                raise
            raise RuntimeError(
                "Under ParameterServerStrategy nothing may update variables of all "
                "workers in a branch or loop of TensorFlow's. A Keras optimizer does "
                "so with `gradient_accumulation_steps`, with `ema_overwrite_frequency` "
                "and inside of a LossScaleOptimizer: leave these out, and give larger "
                "batches where gradients were accumulated; or train with "
                "MirroredStrategy or MultiWorkerMirroredStrategy."
            ) from error

    def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
        """See tf.distribute's, which knows its own `ReduceOp` alone."""
        return super().reduce(ReduceOp.parse(reduce_op).name, value, axis)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """See tf.distribute's, which Keras calls in `fit`, where it cannot be."""
        if not tf.inside_function():
            raise ValueError(
                "ParameterServerStrategy distributes a dataset inside the function "
                "alone that `ClusterCoordinator.create_per_worker_dataset` is given. "
                "`fit`, `evaluate` and `predict` of Keras 3 have no loop for it: write "
                "one with `keras_strategy.coordinator.ClusterCoordinator` and its "
                "`schedule`, or train with MirroredStrategy or "
                "MultiWorkerMirroredStrategy."
            )
        return super().experimental_distribute_dataset(dataset, options)


def _native(resolver: Any) -> Any:
    if isinstance(resolver, tf.distribute.cluster_resolver.ClusterResolver):
        return resolver
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(resolver.cluster_spec().as_dict()),
        task_type=resolver.task_type,
        task_id=resolver.task_id,
        rpc_layer=resolver.rpc_layer or "grpc",
    )
