"""tf.distribute's ParameterServerStrategy, for our cluster resolvers and for Keras.

Native tf.distribute stores a variable of parameter servers in a container of shards,
which reads and assigns as one tensor. Keras needs more of a variable: gradients, an
update in an optimizer, slots beside it, and conversion to an array.
"""

from typing import Any

import tensorflow as tf

from keras_strategy.backends.tensorflow.shards import ShardedVariableExtended
from keras_strategy.values.distributed import ReduceOp


class ParameterServerStrategy(tf.distribute.ParameterServerStrategy):
    """tf.distribute's strategy for custom loops with a `ClusterCoordinator`.

    Args:
        cluster_resolver: A `ClusterResolver` of this package or of tf.distribute.
        variable_partitioner: A function of shape and dtype that returns the number of
            shards, such as
            `keras_strategy.experimental.partitioners.FixedShardsPartitioner(2)`.
    """

    def __init__(self, cluster_resolver: Any, variable_partitioner: Any = None):
        resolver = _native_resolver(cluster_resolver)
        super().__init__(resolver, variable_partitioner)
        # Replaces the native one, whose shards Keras cannot train.
        extended = ShardedVariableExtended(self, resolver, variable_partitioner)
        tf.distribute.Strategy.__init__(self, extended)
        self._should_use_with_coordinator = True

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None):
        """Run a function as tf.distribute does, and explain what Keras cannot do."""
        try:
            return super().run(fn, args, kwargs, options)
        except RuntimeError as error:
            # TensorFlow's, from inside a tf.cond.
            if "`merge_call` called while defining" not in str(error):
                raise
            raise RuntimeError(
                "Under ParameterServerStrategy, a branch or loop of TensorFlow cannot "
                "update the variables of all workers. A Keras optimizer does so with "
                "`gradient_accumulation_steps`, with `ema_overwrite_frequency` and "
                "inside a LossScaleOptimizer. Omit these, and use larger batches "
                "instead of gradient accumulation; or train with MirroredStrategy or "
                "MultiWorkerMirroredStrategy."
            ) from error

    def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
        """Reduce as tf.distribute does, also with our `ReduceOp`."""
        return super().reduce(ReduceOp.parse(reduce_op).name, value, axis)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Distribute as tf.distribute does, and explain why Keras's `fit` cannot."""
        if not tf.inside_function():
            raise ValueError(
                "ParameterServerStrategy can distribute a dataset only inside the "
                "function passed to `ClusterCoordinator.create_per_worker_dataset`. "
                "`fit`, `evaluate` and `predict` of Keras 3 have no loop for it. Write "
                "one with `keras_strategy.coordinator.ClusterCoordinator` and its "
                "`schedule`, or train with MirroredStrategy or "
                "MultiWorkerMirroredStrategy."
            )
        return super().experimental_distribute_dataset(dataset, options)


def _native_resolver(resolver: Any) -> Any:
    if isinstance(resolver, tf.distribute.cluster_resolver.ClusterResolver):
        return resolver
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(resolver.cluster_spec().as_dict()),
        task_type=resolver.task_type,
        task_id=resolver.task_id,
        rpc_layer=resolver.rpc_layer or "grpc",
    )
