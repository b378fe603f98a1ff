"""Reductions by a user's `CrossDeviceOps`.

They serve gradients, `all_reduce` and `reduce` of the user's code. Internal sums (row
counts, metric state) stay with the backend: a lossy reduction must not change them.
"""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_strategy.core import context
from keras_strategy.core.protocol import Replica
from keras_strategy.rules.cross_device_ops import CrossDeviceOps
from keras_strategy.rules.reduction import (
    cast_for_sum,
    axes_to_reduce,
    num_entries,
    check_same_dtype,
)
from keras_strategy.rules.row_weights import apply_row_weight
from keras_strategy.values.distributed import (
    DistributedValues,
    PerReplica,
    ReduceOp,
)


class CustomReducer:
    """Reductions of a strategy by a user's `CrossDeviceOps`."""

    def __init__(self, cross_device_ops: CrossDeviceOps):
        self._ops = cross_device_ops

    def weighted_sum(
        self, replica: Replica, tensors: Sequence[Any], weight: Any
    ) -> list[Any]:
        """Implement `Replica.weighted_sum`."""
        tensors = [ops.convert_to_tensor(tensor) for tensor in tensors]
        return self._sums(replica, [apply_row_weight(tensor, weight) for tensor in tensors])

    def all_reduce(self, replica: Replica, reduce_op: ReduceOp, value: Any) -> Any:
        """Implement `Replica.all_reduce`, with the gradient of the backend's sum."""
        tensor = cast_for_sum(value)
        if "float" in keras.backend.standardize_dtype(tensor.dtype):
            total = self._differentiable_sum(replica, tensor)
        else:
            (total,) = self._sums(replica, [tensor])
        if reduce_op is ReduceOp.SUM:
            return total
        return total / context.get_strategy().num_replicas_in_sync

    def _differentiable_sum(self, replica: Replica, tensor: Any) -> Any:
        value = ops.stop_gradient(tensor)
        (total,) = self._sums(replica, [value])
        # Zeros, whose sum has the gradient that the engine gives to a sum.
        zeros = ops.where(ops.isfinite(value), tensor - value, ops.zeros_like(value))
        return total + replica.all_reduce(ReduceOp.SUM, zeros)

    def _sums(self, replica: Replica, tensors: Sequence[Any]) -> list[Any]:
        def merge(_, *values):
            with context.merge_call_scope():
                return self.combine(ReduceOp.SUM, [(value, value) for value in values])

        if not tensors:
            return []
        totals: Any = replica.merge_call(merge, tuple(tensors), {})
        # Each replica's own, to be written to.
        return [ops.copy(total) for total in totals]

    def combine(
        self, reduce_op: ReduceOp, pairs: Sequence[tuple[Any, Any]]
    ) -> list[Any]:
        """Call the user's `batch_reduce` and check its results."""
        results = self._ops.batch_reduce(reduce_op, pairs)
        name = type(self._ops).__name__
        if len(results) != len(pairs):
            raise ValueError(
                f"`batch_reduce` of {name} must return a value for each of the "
                f"{len(pairs)} pairs. It returned {len(results)}."
            )
        for result, (value, where) in zip(results, pairs, strict=True):
            _check(name, result, value, where)
        return results

    def reduce(self, reduce_op: ReduceOp, value: DistributedValues, axis: Any) -> Any:
        """Implement `ReplicaGroup.reduce`."""
        values = [cast_for_sum(component) for component in value.values]
        check_same_dtype(values)
        device = context.get_strategy().extended.worker_devices[0]
        axes = axes_to_reduce(axis, [v.shape for v in values])
        if not axes:
            (result,) = self.combine(reduce_op, [(PerReplica(values), device)])
            return result
        parts = PerReplica([ops.sum(v, axis=axes) for v in values])
        (total,) = self.combine(ReduceOp.SUM, [(parts, device)])
        if reduce_op is ReduceOp.SUM:
            return total
        return total / sum(num_entries(ops.shape(v), axes) for v in values)


def _check(name: str, result: Any, value: DistributedValues, destinations: Any) -> None:
    places = 1
    if isinstance(destinations, DistributedValues):
        places = len(destinations.values)
    parts = result.values if isinstance(result, DistributedValues) else (result,)
    if not all(ops.is_tensor(part) for part in parts):
        raise TypeError(
            f"`reduce_implementation` of {name} must return tensors, as "
            f"`self.broadcast(total, destinations)` makes them. It returned {result!r}."
        )
    expected = [tuple(value.values[0].shape)] * places
    shapes = [tuple(part.shape) for part in parts]
    if shapes != expected:
        raise ValueError(
            f"`reduce_implementation` of {name} must return, as `self.broadcast(total, "
            f"destinations)` makes them, values of the shapes {expected}, one for each "
            f"destination. It returned {shapes}."
        )
