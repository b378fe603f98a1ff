"""The replicas of one strategy on a mesh of JAX devices."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras import tree

from keras_strategy.backends.jax import internals
from keras_strategy.backends.jax.collectives import (
    JaxWorkers,
    ShardedPerReplica,
    UnevenPerReplica,
    is_array,
    shapes_and_dtypes,
    sum_replicas,
    to_sharded,
)
from keras_strategy.backends.jax.distribution import (
    AXIS,
    ReplicaDistribution,
    in_program,
    put,
)
from keras_strategy.backends.jax.replica import (
    Traced,
    TracedMirrored,
    TracedPerReplica,
    component_of,
    local_component,
    write_component,
)
from keras_strategy.backends.jax.run import Runner
from keras_strategy.backends.jax.state import (
    array_with_value,
    read_components,
    set_components,
)
from keras_strategy.backends.jax.variables import MirroredVariable
from keras_strategy.backends.jax.virtual_replicas import check_deterministic
from keras_strategy.backends.threads.patches import MergedScope
from keras_strategy.cluster.membership import Cluster
from keras_strategy.core import context
from keras_strategy.core.per_replica_attributes import setattr_hooks
from keras_strategy.core.protocols import Strategy
from keras_strategy.core.variable_components import (
    ComponentGroup,
    VariableComponent,
    unwrap_variables,
)
from keras_strategy.data.distributed_dataset import EvenRows
from keras_strategy.devices import LogicalDevices
from keras_strategy.keras_patches.internals import current_stateless_scope, stored_value
from keras_strategy.keras_patches.variable_classes import set_kind
from keras_strategy.options import RunOptions
from keras_strategy.training import ownership, reduction
from keras_strategy.training.train_step import differing_rows_error
from keras_strategy.values import DistributedValues, Mirrored, PerReplica, ReduceOp


class JaxReplicaGroup(ComponentGroup):
    def __init__(
        self, strategy: Strategy, devices: tuple[str, ...], cluster: Cluster | None
    ):
        self._strategy = strategy
        self.devices = devices
        size, rank = (1, 0) if cluster is None else (cluster.size, cluster.rank)
        one_each = tuple((name,) for name in dict.fromkeys(devices))
        is_virtual = strategy.virtual_replicas is not None
        self.distribution = ReplicaDistribution(
            strategy.logical_devices or LogicalDevices((one_each,) * size, rank),
            cluster,
            strategy.shard,
            strategy.parameter_device,
            len(devices) // len(one_each) if is_virtual else None,
        )
        if is_virtual:
            check_deterministic(self.distribution.devices[0].platform)
        self.workers = cluster and JaxWorkers(cluster, self.distribution)
        self.distribution.workers = self.workers
        self._runner = Runner(strategy, self.distribution)

    def scope(self) -> AbstractContextManager[Any]:
        return self.distribution.scope()

    def note_created(self, variable: Any) -> None:
        set_kind(variable, MirroredVariable)

    def adopt(self, variables: Sequence[Any]) -> None:
        variables = [v for v in variables if not internals.is_global_seed(v)]
        for variable in variables:
            set_kind(variable, MirroredVariable)
            layout = self.distribution.get_variable_layout(variable)
            internals.set_layout(variable, layout)
        ownership.broadcast_from_chief(self._strategy, variables)

    def initial_value(self, variable: Any) -> np.ndarray:
        array = stored_value(variable)
        # Sharded variables received the chief's value when they were created.
        return np.asarray(array) if array.is_fully_replicated else np.zeros(0)

    def set_initial_value(self, variable: Any, value: Any) -> None:
        array = put(value, self.distribution.everywhere)
        internals.set_arrays([variable], [array])

    @contextlib.contextmanager
    def trainer_scope(
        self, model: Any, method: str, arguments: dict[str, Any]
    ) -> Iterator[None]:
        custom_sums = self._strategy.extended.custom_reducer is not None
        if method in ("fit", "train_on_batch") and custom_sums:
            raise RuntimeError(
                f"`{method}` on JAX is one program over all devices, in which XLA sums "
                "the gradients: your `cross_device_ops` would not be called. Train "
                "with `strategy.run` (a custom loop), use torch or TensorFlow, or omit "
                "`cross_device_ops`."
            )
        if method in ("fit", "evaluate", "predict"):
            setattr_hooks.end()  # replicas take turns in `run` only
        if method == "predict_on_batch":
            # Keras does not distribute this batch.
            arguments["x"] = self.distribution.place_batch(arguments["x"])
        self.distribution.differing_shapes = None
        try:
            yield
        except BaseException as error:
            if method in ("evaluate", "predict"):
                # Keras takes the values out of the variables during the loop. Only
                # `fit` restores them after an exception.
                internals.synchronize_state(model)
            shapes = self.distribution.differing_shapes
            if shapes is not None and isinstance(error, ValueError | TypeError):
                raise differing_rows_error(shapes) from error
            raise

    def components(self, variable: Any) -> tuple[Any, ...]:
        if in_program():
            return self.per_replica_value(variable).values
        scope = current_stateless_scope()
        if isinstance(scope, MergedScope):
            return tuple(scope.components(variable))
        ownership.broadcast_pending_values()
        # Copied, because the next step donates the variable's array.
        return tuple(map(jnp.copy, read_components(variable, self.distribution)))

    def local_bytes(self, variable: Any) -> tuple[int, ...]:
        shards = array_with_value(variable).addressable_shards
        by_device = {shard.device: shard.data.nbytes for shard in shards}
        # Of the virtual replicas of a device, the first counts it.
        return tuple(by_device.pop(device, 0) for device in self.distribution.devices)

    def local_shards(self, variable: Any) -> list[tuple[tuple[int, ...], Any]]:
        return [
            (tuple(dimension.start or 0 for dimension in shard.index), shard.data)
            for shard in array_with_value(variable).addressable_shards
            if shard.replica_id == 0
        ]

    def per_replica_value(self, variable: Any) -> PerReplica:
        if in_program():
            return TracedPerReplica(component_of(variable))
        return super().per_replica_value(variable)

    def assign_components(self, variable: Any, values: Sequence[Any]) -> None:
        # Copied: a value may be a shard of another variable, which the next step
        # donates.
        devices = self.distribution.devices
        values = [
            jnp.copy(jax.device_put(value, device))
            for value, device in zip(values, devices, strict=True)
        ]
        scope = current_stateless_scope()
        if isinstance(scope, MergedScope):
            scope.assign_components(variable, values)
            return
        ownership.broadcast_pending_values()
        set_components(variable, values, self.distribution)

    def update(
        self, variable: Any, fn: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Any:
        if not in_program():
            return super().update(variable, fn, args, kwargs)
        # One trace serves all replicas: its component stands for all.
        components: dict[int, VariableComponent] = {}

        def argument(leaf):
            if not isinstance(leaf, keras.Variable):
                return local_component(leaf)
            if id(leaf) not in components:
                components[id(leaf)] = VariableComponent(
                    leaf, component_of(leaf), ", ".join(self.devices)
                )
            return components[id(leaf)]

        component = argument(variable)
        args, kwargs = tree.map_structure(argument, (args, kwargs))
        result = unwrap_variables(fn(component, *args, **kwargs))
        for component in components.values():
            if component.assigned:
                write_component(component.container, component.value)
        return tree.map_structure(
            lambda leaf: TracedMirrored(leaf) if keras.ops.is_tensor(leaf) else leaf,
            result,
        )

    def mirror(self, value: Any) -> Mirrored:
        value = keras.ops.convert_to_tensor(value)
        return TracedMirrored(value) if in_program() else super().mirror(value)

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple,
        kwargs: dict,
        options: RunOptions,
        scope: Callable[[], AbstractContextManager[Any]],
    ) -> Any:
        compiled = options.compile is not False
        result = self._runner.run(fn, args, kwargs, compiled, scope)
        return result if self.distribution.replicas > 1 else self._unwrap_single(result)

    def call_once(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        def place(x):
            is_value = is_array(x) or isinstance(x, np.ndarray)
            return put(x, self.distribution.everywhere) if is_value else x

        args, kwargs = tree.map_structure(place, (args, kwargs))
        with context.device_step_scope(self._strategy):
            return fn(*args, **kwargs)

    def _unwrap_single(self, result: Any) -> Any:
        """Unwrap the output of a single replica with several devices."""

        def unwrap(x):
            if not isinstance(x, ShardedPerReplica):
                return x.values[0] if isinstance(x, PerReplica) else x
            return x.array[0] if x.scalars else x.array  # on all its devices

        return tree.map_structure(unwrap, result)

    def reduce(self, reduce_op: ReduceOp, value: DistributedValues, axis: Any) -> Any:
        distribution = self.distribution
        workers: JaxWorkers | None = self.distribution.workers
        is_mean = reduce_op is ReduceOp.MEAN
        if isinstance(value, Traced):  # in a `merge_call` of the replicas' program
            component = reduction.cast_for_sum(value.component)
            axes = reduction.normalize_axes(axis, [tuple(component.shape)])
            if axes:
                component = (jnp.mean if is_mean else jnp.sum)(component, axis=axes)
            return (jax.lax.pmean if is_mean else jax.lax.psum)(component, AXIS)
        if (
            isinstance(value, ShardedPerReplica)
            and value.belongs_to(distribution)
            and not (distribution.topology.sums_in_tree and value.total is None)
        ):
            if workers is None:
                return distribution.to_home(self._reduce_global(value, is_mean, axis))
            # All workers know its shape, so they need not compare it.
            with workers.track_operation("strategy.reduce"):
                return jax.block_until_ready(self._reduce_global(value, is_mean, axis))
        values = value.values
        if not all(map(is_array, values)):
            types = sorted({type(component).__name__ for component in values})
            raise ValueError(
                "Only tensors and numbers can be reduced. Received a PerReplica value "
                f"of {', '.join(types)}: {value!r}"
            )
        shapes = [tuple(np.shape(component)) for component in values]
        axes = reduction.axes_to_reduce(axis, shapes)
        count = sum(reduction.num_entries(shape, axes) for shape in shapes)
        # Each replica reduces its own tensor first, so little data crosses devices.
        values = [reduction.cast_for_sum(component) for component in values]
        reduction.check_same_dtype(values)
        parts = [jnp.sum(v, axis=axes) if axes else v for v in values]
        by_replica = [[part] for part in parts]
        (total,) = sum_replicas("strategy.reduce", distribution, by_replica)
        if workers is not None and is_mean:
            count = sum(workers.cluster.exchange("strategy.reduce: rows", count))
        # Divided by the number of entries, which may differ between replicas.
        total = total / count if is_mean else total
        return put(total, distribution.home or distribution.everywhere)

    def _reduce_global(
        self, value: ShardedPerReplica, is_mean: bool, axis: Any
    ) -> jax.Array:
        replicas = self.distribution.replicas
        rows, *others = value.array.shape
        shape = () if value.scalars else (rows // replicas, *others)
        axes = reduction.normalize_axes(axis, [shape] * replicas)
        if value.total is not None:
            return value.total / replicas if is_mean else value.total
        everywhere = self.distribution.everywhere
        return _reduce_fn(is_mean, (replicas, *shape), axes, everywhere)(value.array)

    def gather(self, values: Sequence[Any], axis: int) -> Any:
        reduction.normalize_axes(axis, [tuple(np.shape(value)) for value in values])
        first = self.distribution.devices[0]
        result = jnp.concatenate([jax.device_put(v, first) for v in values], axis=axis)
        if self.workers is not None:
            result, _ = self.workers.gather("strategy.gather", result, axis)
        # Next to the variables, so that it can be combined with them.
        return put(result, self.distribution.home or self.distribution.everywhere)

    def place(self, parts: Sequence[Any], alike: bool | None = None) -> Any:
        result = self._place(parts, alike)
        return result if self.distribution.replicas > 1 else self._unwrap_single(result)

    def _place(self, parts: Sequence[Any], alike: bool | None) -> PerReplica:
        distribution = self.distribution
        canonical = jax.dtypes.canonicalize_dtype
        # Copied in NumPy: JAX may keep using the memory of the caller's array.
        if isinstance(parts, EvenRows) and type(parts.array) is np.ndarray:
            rows = np.array(parts.array, canonical(parts.array.dtype))
            array = jax.make_array_from_callback(
                rows.shape, distribution.split, rows.__getitem__
            )
            return ShardedPerReplica(array, False, distribution)
        first = parts[0]
        if distribution.cluster is None and all(
            isinstance(part, np.ndarray)
            and part.shape == first.shape
            and part.dtype == first.dtype
            for part in parts
        ):
            join = np.concatenate if first.ndim else np.stack
            rows = join(parts, dtype=canonical(first.dtype), casting="unsafe")
            array = jax.device_put(rows, distribution.split)
            return ShardedPerReplica(array, first.ndim == 0, distribution)
        arrays = [
            x if isinstance(x, jax.Array) else np.array(x, canonical(x.dtype))
            for x in parts
        ]
        arrays = list(map(jax.device_put, arrays, distribution.devices))
        if distribution.cluster is None:
            alike = len(set(shapes_and_dtypes(arrays))) == 1
        if alike:
            return to_sharded(PerReplica(arrays), distribution)
        # Without `alike`, the workers compare the shapes and dtypes at each use.
        return PerReplica(arrays) if alike is None else UnevenPerReplica(arrays)


@functools.lru_cache(maxsize=128)
def _reduce_fn(
    is_mean: bool, shape: tuple[int, ...], axes: tuple[int, ...], everywhere: Any
) -> Any:
    """Return the program that reduces components; `shape` starts with their number."""
    count = shape[0] * reduction.num_entries(shape[1:], axes)

    def reduce(array):
        parts = reduction.cast_for_sum(jnp.reshape(array, shape))
        # Reduce within each replica first, so little data crosses devices.
        if axes:
            parts = jnp.sum(parts, axis=tuple(1 + i for i in axes))
        total = jnp.sum(parts, axis=0)
        return total / count if is_mean else total

    return jax.jit(reduce, out_shardings=everywhere)
