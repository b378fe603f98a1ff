"""Reductions and gathers over replicas and workers, outside of programs.

Inside a program, XLA's collectives include the other processes. `JaxWorkers` combines
values that each process holds by itself.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from keras_strategy.backends.jax.distribution import AXIS, ReplicaDistribution, put
from keras_strategy.backends.jax.replica import Traced
from keras_strategy.backends.jax.values import (
    ShardedPerReplica,
    is_array,
    to_sharded,
)
from keras_strategy.cluster.membership import Cluster
from keras_strategy.core.collectives import (
    WorkerCollectives,
    describe_layouts,
    operation_kind,
)
from keras_strategy.training.reduction import (
    axes_to_reduce,
    cast_for_sum,
    check_same_dtype,
    normalize_axes,
    num_entries,
)
from keras_strategy.values import DistributedValues, PerReplica, ReduceOp


class JaxWorkers(WorkerCollectives):
    """Implementation of `core.collectives.WorkerCollectives` on JAX."""

    def __init__(self, cluster: Cluster, distribution: ReplicaDistribution):
        super().__init__(cluster)
        self._distribution = distribution

    def sum_all(self, name: str, tensors: Sequence[Any]) -> list[jax.Array]:
        tensors = [jnp.asarray(tensor) for tensor in tensors]
        specs = [[list(t.shape), str(t.dtype)] for t in tensors]
        different = self.cluster.values_if_different(operation_kind(name), specs)
        if different is not None:
            received = self.cluster.format_by_worker(map(describe_layouts, different))
            raise ValueError(
                f"`{name}` needs values whose shapes and dtypes are the same on every "
                f"worker. Received: {received}."
            )
        with self.track_operation(name):
            stacked = [self._stack_workers(tensor) for tensor in tensors]
            totals = _sum_fn(self._distribution.everywhere)(stacked)
            jax.block_until_ready(totals)
        return [self._local(total) for total in totals]

    def gather(self, name: str, tensor: Any, axis: int) -> tuple[jax.Array, list[int]]:
        tensor = jnp.asarray(tensor)
        spec = [list(tensor.shape), str(tensor.dtype)]
        specs = self.cluster.exchange(operation_kind(name), spec)
        # A tensor without this axis differs from the others in rank.
        axis %= max(tensor.ndim, 1)
        others = {(*s[:axis], "", *s[axis + 1 :], dtype) for s, dtype in specs}
        if len(others) > 1 or tensor.ndim == 0:
            raise self.calls_differ_error(
                name, [name], specs, f" other than axis {axis}"
            )
        counts = [shape[axis] for shape, _ in specs]
        devices = self._distribution.devices
        # Pad to equally many rows per device.
        size = -(-max(counts) // len(devices))
        rows = jnp.moveaxis(tensor, axis, 0)
        missing = size * len(devices) - rows.shape[0]
        rows = jnp.pad(rows, [(0, missing)] + [(0, 0)] * (rows.ndim - 1))
        shards = [
            jax.device_put(rows[i * size : (i + 1) * size], device)
            for i, device in enumerate(devices)
        ]
        with self.track_operation(name):
            split = self._distribution.join_shards(shards)
            padded = _replicate_fn(self._distribution.everywhere)(split)
            jax.block_until_ready(padded)
        block = size * len(devices)
        padded = self._local(padded)
        parts = [
            padded[worker * block : worker * block + count]
            for worker, count in enumerate(counts)
        ]
        return jnp.moveaxis(jnp.concatenate(parts), 0, axis), counts

    def broadcast(self, name: str, tensors: Sequence[Any]) -> list[Any]:
        with self.track_operation(name):
            arrays = [np.asarray(tensor) for tensor in tensors]
            return multihost_utils.broadcast_one_to_all(arrays)

    def _stack_workers(self, tensor: jax.Array) -> jax.Array:
        """Stack the workers' tensors, with zeros for all devices but the first."""
        first, *others = self._distribution.devices
        parts = [jax.device_put(tensor[None], first)]
        if others:
            zeros = np.zeros((1, *tensor.shape), tensor.dtype)
            parts += [jax.device_put(zeros, device) for device in others]
        return self._distribution.join_shards(parts)

    def _local(self, array: jax.Array) -> jax.Array:
        first = self._distribution.devices[0]
        return next(s.data for s in array.addressable_shards if s.device == first)


@functools.cache
def _sum_fn(everywhere: Any) -> Any:
    def sums(stacked):
        return [jnp.sum(x, axis=0, dtype=x.dtype) for x in stacked]

    return jax.jit(sums, out_shardings=everywhere)


@functools.cache
def _replicate_fn(everywhere: Any) -> Any:
    return jax.jit(lambda x: x, out_shardings=everywhere)


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
