"""tf.distribute's ParameterServerStrategy, for our cluster resolvers and for Keras.

Native tf.distribute stores a variable of parameter servers in a container of shards,
which reads and assigns as one tensor. Keras needs more of a variable: gradients, an
update in an optimizer, slots beside it, and conversion to an array.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.distribute_lib import UpdateContext
from tensorflow.python.distribute.parameter_server_strategy_v2 import (
    ParameterServerStrategyV2Extended,
)
from tensorflow.python.distribute.sharded_variable import ShardedVariable
from tensorflow.python.framework.composite_tensor_gradient import (
    CompositeTensorGradient,
)

from keras_strategy.values import ReduceOp

# Keras's key of a variable's value in a checkpoint.
_VALUE = "VARIABLE_VALUE"


class _ShardedGradient(CompositeTensorGradient):
    """One gradient for all shards, as `tf.GradientTape` computes it."""

    def get_gradient_components(self, value: "KerasShardedVariable") -> list[Any]:
        return [shard.handle for shard in value.variables]

    def replace_gradient_components(
        self, value: "KerasShardedVariable", component_grads: Sequence[Any]
    ) -> Any:
        found, begin = [], 0
        for shard, gradient in zip(value.variables, component_grads, strict=True):
            if gradient is not None:
                found.append((begin, shard, gradient))
            begin += shard.shape[0]
        if not found:
            return None
        if all(isinstance(gradient, tf.IndexedSlices) for *_, gradient in found):
            # Keep repeated rows, as for an unsharded variable: Keras squares each of
            # its slices.
            return tf.IndexedSlices(
                tf.concat([gradient.values for *_, gradient in found], axis=0),
                tf.concat([g.indices + begin for begin, _, g in found], axis=0),
                tf.constant(value.shape.as_list()),
            )
        parts = [
            tf.zeros(shard.shape, shard.dtype)
            if gradient is None
            else tf.convert_to_tensor(gradient)
            for shard, gradient in zip(value.variables, component_grads, strict=True)
        ]
        return tf.concat(parts, axis=0)


class KerasShardedVariable(ShardedVariable):
    """Native container of shards along the first dimension, with Keras's needs."""

    __composite_gradient__ = _ShardedGradient()

    @property
    def handle(self) -> "KerasShardedVariable":
        """The object that a tape watches, which stands for all shards."""
        return self

    def __array__(self, dtype: Any = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    def _serialize_to_tensors(self) -> dict[str, Any]:
        # A checkpoint of a Keras variable stores it as one tensor.
        return {_VALUE: tf.convert_to_tensor(self)}

    def _restore_from_tensors(self, restored_tensors: dict[str, Any]) -> Any:
        return self.assign(restored_tensors[_VALUE])


class ShardedVariableExtended(ParameterServerStrategyV2Extended):
    """Part of the native strategy that creates and updates variables."""

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        if isinstance(kwargs.get("colocate_with"), KerasShardedVariable):
            # A slot of a sharded variable is sharded alike.
            del kwargs["colocate_with"]
        variable = super()._create_variable(next_creator, **kwargs)
        if isinstance(variable, ShardedVariable):
            return KerasShardedVariable(variable.variables)
        return variable

    def _update(
        self, var: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool
    ) -> Any:
        if not isinstance(var, KerasShardedVariable):
            return super()._update(var, fn, args, kwargs, group)
        # Each shard is updated on its server, so the update has no single device.
        with UpdateContext(None):
            args, kwargs = self._select_single_value((args, kwargs))
            result = fn(var, *args, **kwargs)
        return result if group else tf.nest.map_structure(self._local_results, result)


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
