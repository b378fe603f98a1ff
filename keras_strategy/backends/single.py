"""The single replica of a strategy of one device, without patches of Keras."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_strategy.core import context
from keras_strategy.core.context import ReplicaContext
from keras_strategy.core.protocols import Replica, Strategy
from keras_strategy.core.registry import get_engine
from keras_strategy.core.step_state import StepState
from keras_strategy.core.variable_components import (
    ComponentGroup,
    VariableComponent,
    unwrap_variables,
)
from keras_strategy.keras_patches.internals import byte_count
from keras_strategy.options import RunOptions
from keras_strategy.training.reduction import cast_for_sum
from keras_strategy.values import (
    DistributedValues,
    Mirrored,
    ReduceOp,
    is_numeric_array,
    map_leaves,
    select_replica,
)


def arrays_to_tensors(structure: Any) -> Any:
    """Convert NumPy arrays, which not every backend can mix with its tensors."""
    return map_leaves(
        lambda leaf: (
            keras.ops.convert_to_tensor(leaf) if is_numeric_array(leaf) else leaf
        ),
        structure,
    )


class SingleReplica(Replica):
    """The only replica, so that collectives are identities."""

    id = 0

    def __init__(self, strategy: Strategy, devices: tuple[str, ...]):
        self._strategy = strategy
        self.devices = devices
        self.step = StepState()

    def all_reduce(self, reduce_op: ReduceOp, value: Any) -> Any:
        if reduce_op is ReduceOp.SUM:
            return cast_for_sum(value)
        return keras.ops.convert_to_tensor(value)

    def all_gather(self, value: Any, axis: int) -> Any:
        return keras.ops.convert_to_tensor(value)

    def merge_call(self, merge_fn: Callable[..., Any], args: tuple, kwargs: dict):
        with context.cross_replica_scope(self._strategy):
            return merge_fn(self._strategy, *args, **kwargs)

    def once(self, fn: Callable[[], Any]) -> Any:
        return fn()

    def weighted_sum(self, tensors: Sequence[Any], weight: Any) -> list[Any]:
        return list(tensors)

    def write(self, variable: Any, value: Any) -> None:
        variable.assign(value)


class SingleReplicaGroup(ComponentGroup):
    """The group of a strategy of one device, on any backend."""

    def __init__(self, strategy: Strategy, devices: tuple[str, ...]):
        self.devices = devices
        self._strategy = strategy
        self.context = ReplicaContext(strategy, SingleReplica(strategy, devices))

    def scope(self):
        return get_engine().device_scope(self.devices[0])

    def trainer_scope(self, model: Any, method: str, arguments: dict[str, Any]):
        return contextlib.nullcontext()

    def components(self, variable: Any) -> tuple[Any, ...]:
        return (variable.value,)

    def local_bytes(self, variable: Any) -> tuple[int, ...]:
        return (byte_count(variable),)

    def assign_components(self, variable: Any, values: Sequence[Any]) -> None:
        variable.assign(values[0])

    def owns_native(self, variable: Any) -> bool | None:
        return get_engine().owns_native(variable)

    def update(
        self, variable: Any, fn: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Any:
        if self.owns_native(variable):
            return fn(variable, *args, **kwargs)
        device = self._strategy.extended.worker_devices[0]
        component = VariableComponent(variable, variable.value, device)
        args, kwargs = arrays_to_tensors(select_replica((args, kwargs), 0, 1, "update"))
        result = unwrap_variables(fn(component, *args, **kwargs))
        if component.assigned:
            self.assign_components(variable, [component.value])
        return result

    def mirror(self, value: Any) -> Mirrored:
        return Mirrored([value])

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple,
        kwargs: dict,
        options: RunOptions,
        scope: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> Any:
        with scope():
            args, kwargs = arrays_to_tensors(select_replica((args, kwargs), 0, 1))
            with context.replica_scope(self.context):
                return fn(*args, **kwargs)

    def reduce(self, reduce_op: ReduceOp, value: DistributedValues, axis: Any) -> Any:
        (component,) = value.values
        if axis is None and reduce_op is ReduceOp.MEAN:
            return component
        component = cast_for_sum(component)
        if axis is None:
            return component
        combine = keras.ops.sum if reduce_op is ReduceOp.SUM else keras.ops.mean
        return combine(component, axis=axis)

    def gather(self, values: Sequence[Any], axis: int) -> Any:
        return keras.ops.concatenate(list(values), axis=axis)

    def place(self, parts: Sequence[Any], alike: bool | None = None) -> Any:
        (part,) = parts
        with self.scope():
            if isinstance(part, np.ndarray):
                part = np.copy(part)
            return keras.ops.convert_to_tensor(part)
