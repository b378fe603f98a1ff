"""Sharded variables of parameter servers, which Keras uses as one `tf.Variable`."""

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
