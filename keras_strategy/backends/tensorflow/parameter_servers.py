"""tf.distribute's ParameterServerStrategy, for our cluster resolvers and for Keras.

Native tf.distribute stores a variable of parameter servers in a container of shards,
which reads and assigns as one tensor. Keras needs more of a variable: gradients, an
update in an optimizer, slots beside it, and conversion to an array.
"""

import itertools
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

from keras_strategy.cluster_resolver import ClusterSpec
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
        present = [g for g in component_grads if g is not None]
        if not present:
            return None
        pairs = list(zip(value.variables, component_grads, strict=True))
        if all(isinstance(gradient, tf.IndexedSlices) for gradient in present):
            # Keep repeated rows, as for an unsharded variable: Keras squares each of
            # its slices.
            rows = [shard.shape[0] for shard, _ in pairs]
            begins = itertools.accumulate(rows, initial=0)
            indices = [
                gradient.indices + begin
                for begin, (_, gradient) in zip(begins, pairs, strict=False)
                if gradient is not None
            ]
            return tf.IndexedSlices(
                tf.concat([gradient.values for gradient in present], axis=0),
                tf.concat(indices, axis=0),
                tf.constant(value.shape.as_list()),
            )
        parts = [
            tf.zeros(shard.shape, shard.dtype) if g is None else tf.convert_to_tensor(g)
            for shard, g in pairs
        ]
        return tf.concat(parts, axis=0)


class KerasShardedVariable(ShardedVariable):
    """Native container of shards along the first dimension, with Keras's needs."""

    __composite_gradient__ = _ShardedGradient()

    @property
    def handle(self) -> "KerasShardedVariable":
        return self  # a tape watches the container, which stands for all shards

    def __array__(self, dtype: Any = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    def _serialize_to_tensors(self) -> dict[str, Any]:
        # A checkpoint of a Keras variable stores it as one tensor.
        return {_VALUE: tf.convert_to_tensor(self)}

    def _restore_from_tensors(self, restored_tensors: dict[str, Any]) -> Any:
        return self.assign(restored_tensors[_VALUE])


class ShardedVariableExtended(ParameterServerStrategyV2Extended):
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


class Server(tf.distribute.Server):
    """tf.distribute's server, through which a coordinator uses this process.

    Args:
        server_or_cluster_def: A `ClusterSpec` of this package, or what native
            tf.distribute takes: a dict, `tf.train.ClusterSpec` or `tf.train.ServerDef`.
        job_name: The job of this process, such as `"worker"` or `"ps"`.
        task_index: The index of this process in its job.
        protocol: `"grpc"`, TensorFlow's default.
        config: A `tf.compat.v1.ConfigProto` for the server's devices and threads.
        start: Whether to serve at once.

    Example:

    ```python
    import keras_strategy as ks

    cluster = ks.cluster_resolver.ClusterSpec({"worker": ["localhost:0"]})
    server = ks.Server(cluster, "worker", 0, protocol="grpc", start=False)
    ```
    """

    def __init__(
        self,
        server_or_cluster_def: Any,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: Any = None,
        start: bool = True,
    ):
        cluster = server_or_cluster_def
        if isinstance(cluster, ClusterSpec):
            cluster = cluster.as_dict()
        super().__init__(cluster, job_name, task_index, protocol, config, start)


class ParameterServerStrategy(tf.distribute.ParameterServerStrategy):
    """tf.distribute's strategy for custom loops with a `ClusterCoordinator`.

    Args:
        cluster_resolver: A `ClusterResolver` of this package or of tf.distribute.
        variable_partitioner: A function of shape and dtype that returns the number of
            shards, such as
            `keras_strategy.experimental.partitioners.FixedShardsPartitioner(2)`.
    """

    def __init__(self, cluster_resolver: Any, variable_partitioner: Any = None):
        resolver = cluster_resolver
        natives = tf.distribute.cluster_resolver
        if not isinstance(resolver, natives.ClusterResolver):
            resolver = natives.SimpleClusterResolver(
                tf.train.ClusterSpec(resolver.cluster_spec().as_dict()),
                task_type=resolver.task_type,
                task_id=resolver.task_id,
                rpc_layer=resolver.rpc_layer or "grpc",
            )
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
