"""Distributed values stored as one global array, and their reductions."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_strategy.backends.jax.collectives import JaxWorkers
from keras_strategy.backends.jax.distribution import AXIS, ReplicaDistribution, put
from keras_strategy.backends.jax.replica import Traced
from keras_strategy.data.local_rows import EvenRows
from keras_strategy.training.reduction import (
    axes_to_reduce,
    cast_for_sum,
    check_same_dtype,
    normalize_axes,
    num_entries,
)
from keras_strategy.values import DistributedValues, PerReplica, ReduceOp


class ShardedPerReplica(PerReplica):
    """PerReplica value whose components are the shards of one global array.

    The array concatenates the replicas' tensors along their first dimension, or stacks
    scalars, so that each shard is a component. Components are created on demand.

    Args:
        array: The array, split along its first dimension.
        scalars: True if the components are scalars.
        distribution: The group's distribution.
        total: The sum of the components on every device, if a program returned it.
    """

    def __init__(
        self,
        array: jax.Array,
        scalars: bool,
        distribution: Any,
        total: jax.Array | None = None,
    ):
        self.array = array
        self.scalars = scalars
        self.total = total
        self.count = len(distribution.devices)
        self.distribution = distribution

    def belongs_to(self, distribution: ReplicaDistribution) -> bool:
        """Return True if the group's devices hold one component each."""
        return self.distribution.mesh == distribution.mesh

    @property
    def values(self) -> tuple[Any, ...]:
        values = local_shards(self.array, self.distribution)
        return tuple(x.reshape(()) for x in values) if self.scalars else values

    def __repr__(self) -> str:
        return repr(PerReplica(self.values))

    def __reduce__(self):
        return PerReplica, (tuple(np.asarray(value) for value in self.values),)


class UnevenPerReplica(PerReplica):
    """PerReplica value whose components differ in shape or dtype on some worker.

    All workers know this without communication.
    """


def local_shards(
    array: jax.Array, distribution: ReplicaDistribution
) -> tuple[Any, ...]:
    """Return an array's shards on this worker's devices, in the order of replicas."""
    by_device = {shard.device: shard.data for shard in array.addressable_shards}
    return tuple(by_device[device] for device in distribution.devices)


def shapes_and_dtypes(values: Sequence[Any]) -> list[tuple[tuple[int, ...], str]]:
    """Return the shapes and JAX dtypes of components."""
    return [
        (tuple(np.shape(value)), str(jax.dtypes.result_type(value))) for value in values
    ]


def is_array(value: Any) -> bool:
    """Return True if a component is a tensor or a number."""
    if isinstance(value, keras.Variable):
        return False
    return isinstance(value, jax.Array | np.ndarray | np.generic | int | float)


def to_sharded(
    value: DistributedValues, distribution: ReplicaDistribution
) -> ShardedPerReplica:
    """Put components of equal shape and dtype on their devices, as one array."""
    if isinstance(value, ShardedPerReplica) and value.belongs_to(distribution):
        return value
    values = list(value.values)
    scalars = np.ndim(values[0]) == 0
    if scalars:
        values = [jnp.reshape(jnp.asarray(v), (1,)) for v in values]
    dtype = jnp.result_type(*values)
    # Converted first: NumPy's int64 becomes JAX's default integer.
    shards = [
        jax.device_put(jnp.asarray(v, dtype=dtype), device)
        for v, device in zip(values, distribution.devices, strict=True)
    ]
    return ShardedPerReplica(distribution.join_shards(shards), scalars, distribution)


def place(
    parts: Sequence[Any], distribution: ReplicaDistribution, alike: bool | None
) -> PerReplica:
    """Implement `ReplicaGroup.place`."""
    if isinstance(parts, EvenRows) and type(parts.array) is np.ndarray:
        # Copied, see below.
        dtype = jax.dtypes.canonicalize_dtype(parts.array.dtype)
        rows = np.array(parts.array, dtype, copy=True)
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
        dtype = jax.dtypes.canonicalize_dtype(first.dtype)
        join = np.concatenate if first.ndim else np.stack
        rows = join(parts, dtype=dtype, casting="unsafe")
        array = jax.device_put(rows, distribution.split)
        return ShardedPerReplica(array, first.ndim == 0, distribution)

    def put_copy(part, device):
        if isinstance(part, jax.Array):
            return jax.device_put(part, device)
        # Copied in NumPy: JAX may keep using the memory of the caller's array.
        dtype = jax.dtypes.canonicalize_dtype(part.dtype)
        return jax.device_put(np.array(part, dtype, copy=True), device)

    arrays = [put_copy(*pair) for pair in zip(parts, distribution.devices, strict=True)]
    if distribution.cluster is None:
        alike = len(set(shapes_and_dtypes(arrays))) == 1
    if alike:
        return to_sharded(PerReplica(arrays), distribution)
    # If the other workers' arrays are unknown, the workers compare them at each use.
    return PerReplica(arrays) if alike is None else UnevenPerReplica(arrays)


def reduce(
    reduce_op: ReduceOp,
    value: DistributedValues,
    axis: Any,
    distribution: ReplicaDistribution,
    workers: JaxWorkers | None,
) -> Any:
    """Implement `ReplicaGroup.reduce`."""
    if isinstance(value, Traced):
        return _reduce_in_program(reduce_op, value.component, axis)
    if isinstance(value, ShardedPerReplica) and value.belongs_to(distribution):
        if workers is None:
            return _reduce_global(reduce_op, value, axis, distribution)
        # All workers know its shape, so they need not compare it.
        with workers.track_operation("strategy.reduce"):
            total = _reduce_global(reduce_op, value, axis, distribution)
            return jax.block_until_ready(total)
    values = value.values
    if not all(is_array(component) for component in values):
        types = sorted({type(component).__name__ for component in values})
        raise ValueError(
            "Only tensors and numbers can be reduced. Received a PerReplica value of "
            f"{', '.join(types)}: {value!r}"
        )
    shapes = [tuple(np.shape(value)) for value in values]
    axes = axes_to_reduce(axis, shapes)
    counts = [num_entries(shape, axes) for shape in shapes]
    # Each replica reduces its own tensor first, so little data crosses devices.
    values = [cast_for_sum(v) for v in values]
    check_same_dtype(values)
    parts = [jnp.sum(v, axis=axes) if axes else v for v in values]
    if workers is not None:
        return _reduce_over_workers(reduce_op, parts, counts, distribution, workers)
    sharded = to_sharded(PerReplica(parts), distribution)
    total = _reduce_global(ReduceOp.SUM, sharded, None, distribution)
    # Divided by the number of entries, which may differ between replicas.
    return total / sum(counts) if reduce_op is ReduceOp.MEAN else total


def _reduce_global(
    reduce_op: ReduceOp,
    value: ShardedPerReplica,
    axis: Any,
    distribution: ReplicaDistribution,
) -> jax.Array:
    """Reduce components of equal shape by one program."""
    replicas = distribution.replicas
    rows, *others = value.array.shape
    shape = () if value.scalars else (rows // replicas, *others)
    axes = normalize_axes(axis, [shape] * replicas)
    if value.total is not None:
        mean = reduce_op is ReduceOp.MEAN
        return value.total / replicas if mean else value.total
    reduce_fn = _reduce_fn(
        reduce_op is ReduceOp.MEAN, (replicas, *shape), axes, distribution.everywhere
    )
    return reduce_fn(value.array)


@functools.lru_cache(maxsize=128)
def _reduce_fn(
    mean: bool, shape: tuple[int, ...], axes: tuple[int, ...], everywhere: Any
) -> Any:
    """Return the program that reduces components of equal shape.

    Args:
        mean: Return the mean instead of the sum.
        shape: The number of replicas and the shape of a component.
        axes: The axes of a component to reduce as well.
        everywhere: The sharding of the result.
    """
    count = shape[0] * num_entries(shape[1:], axes)

    def fn(array):
        parts = cast_for_sum(jnp.reshape(array, shape))
        # Reduce within each replica first, so little data crosses devices.
        if axes:
            parts = jnp.sum(parts, axis=tuple(1 + i for i in axes))
        total = jnp.sum(parts, axis=0)
        return total / count if mean else total

    return jax.jit(fn, out_shardings=everywhere)


def _reduce_over_workers(
    reduce_op: ReduceOp,
    parts: Sequence[Any],
    counts: Sequence[int],
    distribution: ReplicaDistribution,
    workers: JaxWorkers,
) -> Any:
    first = distribution.devices[0]
    total, *others = [jax.device_put(jnp.asarray(part), first) for part in parts]
    for other in others:
        total = total + other
    (total,) = workers.sum_all("strategy.reduce", [total])
    if reduce_op is ReduceOp.MEAN:
        total = total / sum(
            workers.cluster.exchange("strategy.reduce: rows", sum(counts))
        )
    return put(total, distribution.everywhere)


def gather(
    values: Sequence[Any],
    axis: int,
    distribution: ReplicaDistribution,
    workers: JaxWorkers | None,
) -> Any:
    """Implement `ReplicaGroup.gather`.

    The result is replicated, so it can be combined with variables and results of
    `reduce`.
    """
    normalize_axes(axis, [tuple(np.shape(value)) for value in values])
    first = distribution.devices[0]
    result = jnp.concatenate([jax.device_put(v, first) for v in values], axis=axis)
    if workers is not None:
        result, _ = workers.gather("strategy.gather", result, axis)
    return put(result, distribution.everywhere)


def _reduce_in_program(reduce_op: ReduceOp, component: Any, axis: Any) -> Any:
    """Reduce inside of `merge_call`, by a collective of the replicas' program."""
    axes = normalize_axes(axis, [tuple(component.shape)])
    component = cast_for_sum(component)
    if axes:
        combine = jnp.sum if reduce_op is ReduceOp.SUM else jnp.mean
        component = combine(component, axis=axes)
    if reduce_op is ReduceOp.SUM:
        return jax.lax.psum(component, AXIS)
    return jax.lax.pmean(component, AXIS)
