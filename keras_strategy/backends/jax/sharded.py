"""Values of all replicas as one array, and what can be computed of them."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_strategy.backends.jax.distribution import AXIS, ReplicaDistribution, put
from keras_strategy.backends.jax.replica import Traced
from keras_strategy.backends.jax.workers import JaxWorkers
from keras_strategy.input.parts import EvenRows
from keras_strategy.rules.reduction import (
    addable,
    axes_of,
    axes_to_reduce,
    entries,
    require_one_dtype,
)
from keras_strategy.values.distributed import DistributedValues, PerReplica, ReduceOp


class ShardedPerReplica(PerReplica):
    """A PerReplica value whose components are the shards of one array.

    The replicas' tensors are joined along their first dimension; scalars become a
    vector. So each shard is a component as it is, and is not looked at before
    somebody asks for it.

    Args:
        array: The array, split over the devices along its first dimension.
        scalars: Whether the components are scalars.
        distribution: The layouts of the group.
        total: The sum of the components on every device, if that is known.
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
        """Whether the components are on the devices of a group, one on each."""
        return self.distribution.mesh == distribution.mesh

    @property
    def values(self) -> tuple[Any, ...]:
        parts = shards(self.array, self.distribution)
        return tuple(part.reshape(()) for part in parts) if self.scalars else parts

    def __repr__(self) -> str:
        return repr(PerReplica(self.values))

    def __reduce__(self):
        return PerReplica, (tuple(np.asarray(value) for value in self.values),)


class UnevenPerReplica(PerReplica):
    """A PerReplica value whose components differ in shape or dtype, perhaps elsewhere.

    All workers know that, so that none of them need ask whether one program serves it.
    """


def shards(array: jax.Array, distribution: ReplicaDistribution) -> tuple[Any, ...]:
    """What each of our devices holds of an array, in the order of the replicas."""
    by_device = {shard.device: shard.data for shard in array.addressable_shards}
    return tuple(by_device[device] for device in distribution.devices)


def types_of(values: Sequence[Any]) -> list[tuple[tuple[int, ...], str]]:
    """The shapes and dtypes of the components of a value, as JAX has them."""
    return [
        (tuple(np.shape(value)), str(jax.dtypes.result_type(value))) for value in values
    ]


def is_array(value: Any) -> bool:
    """Whether a component is a tensor or a number."""
    if isinstance(value, keras.Variable):
        return False
    return isinstance(value, jax.Array | np.ndarray | np.generic | int | float)


def joined(
    value: DistributedValues, distribution: ReplicaDistribution
) -> ShardedPerReplica:
    """Puts the components of a value on their devices, as one array.

    Args:
        value: Components of one shape and dtype.
        distribution: The layouts of the group.
    """
    if isinstance(value, ShardedPerReplica) and value.belongs_to(distribution):
        return value
    values = list(value.values)
    scalars = np.ndim(values[0]) == 0
    if scalars:
        values = [jnp.reshape(jnp.asarray(v), (1,)) for v in values]
    dtype = jnp.result_type(*values)
    # dtype first: int64 of NumPy becomes what JAX makes of it.
    parts = [
        jax.device_put(jnp.asarray(v, dtype=dtype), device)
        for v, device in zip(values, distribution.devices, strict=True)
    ]
    return ShardedPerReplica(distribution.joined(parts), scalars, distribution)


def placed(
    parts: Sequence[Any], distribution: ReplicaDistribution, alike: bool | None
) -> PerReplica:
    """See `ReplicaGroup.place`; one array where the parts have one shape and dtype."""
    if isinstance(parts, EvenRows) and type(parts.whole) is np.ndarray:
        # A copy, as below.
        dtype = jax.dtypes.canonicalize_dtype(parts.whole.dtype)
        whole = np.array(parts.whole, dtype, copy=True)
        array = jax.make_array_from_callback(
            whole.shape, distribution.split, whole.__getitem__
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
        whole = join(parts, dtype=dtype, casting="unsafe")
        array = jax.device_put(whole, distribution.split)
        return ShardedPerReplica(array, first.ndim == 0, distribution)

    def put(part, device):
        if isinstance(part, jax.Array):
            return jax.device_put(part, device)
        # A copy in NumPy: JAX may go on using the memory of an array that it gets.
        dtype = jax.dtypes.canonicalize_dtype(part.dtype)
        return jax.device_put(np.array(part, dtype, copy=True), device)

    arrays = [put(*pair) for pair in zip(parts, distribution.devices, strict=True)]
    if distribution.cluster is None:
        alike = len(set(types_of(arrays))) == 1
    if alike:
        return joined(PerReplica(arrays), distribution)
    # Where nothing is known of the other workers' arrays, they are asked at each use.
    return PerReplica(arrays) if alike is None else UnevenPerReplica(arrays)


def reduced(
    reduce_op: ReduceOp,
    value: DistributedValues,
    axis: Any,
    distribution: ReplicaDistribution,
    workers: JaxWorkers | None,
) -> Any:
    """See `ReplicaGroup.reduce`."""
    if isinstance(value, Traced):
        return _reduced_in_program(reduce_op, value.component, axis)
    if isinstance(value, ShardedPerReplica) and value.belongs_to(distribution):
        if workers is None:
            return _reduced_in_one(reduce_op, value, axis, distribution)
        # All workers know its shape: they need not ask each other for it.
        with workers.waiting("strategy.reduce"):
            total = _reduced_in_one(reduce_op, value, axis, distribution)
            return jax.block_until_ready(total)
    values = value.values
    if not all(is_array(component) for component in values):
        kinds = sorted({type(component).__name__ for component in values})
        raise ValueError(
            "Only tensors and numbers can be reduced. Received a PerReplica value of "
            f"{', '.join(kinds)}: {value!r}"
        )
    shapes = [tuple(np.shape(value)) for value in values]
    axes = axes_to_reduce(axis, shapes)
    counts = [entries(shape, axes) for shape in shapes]
    # Each replica reduces its own; what crosses the devices is small then.
    values = [addable(v) for v in values]
    require_one_dtype(values)
    parts = [jnp.sum(v, axis=axes) if axes else v for v in values]
    if workers is not None:
        return _reduced_over_workers(reduce_op, parts, counts, distribution, workers)
    whole = joined(PerReplica(parts), distribution)
    total = _reduced_in_one(ReduceOp.SUM, whole, None, distribution)
    # By their rows: the replicas may have different numbers of them.
    return total / sum(counts) if reduce_op is ReduceOp.MEAN else total


def _reduced_in_one(
    reduce_op: ReduceOp,
    value: ShardedPerReplica,
    axis: Any,
    distribution: ReplicaDistribution,
) -> jax.Array:
    """Reduces parts of one shape by one program."""
    replicas = distribution.replicas
    rows, *others = value.array.shape
    shape = () if value.scalars else (rows // replicas, *others)
    axes = axes_of(axis, [shape] * replicas)
    if value.total is not None:
        mean = reduce_op is ReduceOp.MEAN
        return value.total / replicas if mean else value.total
    program = _reduction(
        reduce_op is ReduceOp.MEAN, (replicas, *shape), axes, distribution.everywhere
    )
    return program(value.array)


@functools.lru_cache(maxsize=128)
def _reduction(
    mean: bool, shape: tuple[int, ...], axes: tuple[int, ...], everywhere: Any
) -> Any:
    """The program that reduces an array of parts of equal shapes.

    Args:
        mean: Whether to the mean.
        shape: The array's, with the replicas in front.
        axes: Of a part, those to reduce as well.
        everywhere: The layout of the result.
    """
    count = shape[0] * entries(shape[1:], axes)

    def reduction(array):
        parts = addable(jnp.reshape(array, shape))
        # Each replica reduces its own; what crosses the devices is small then.
        own = jnp.sum(parts, axis=tuple(1 + i for i in axes)) if axes else parts
        total = jnp.sum(own, axis=0)
        return total / count if mean else total

    return jax.jit(reduction, out_shardings=everywhere)


def _reduced_over_workers(
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
        total = total / sum(workers.cluster.agree("strategy.reduce: rows", sum(counts)))
    return put(total, distribution.everywhere)


def gathered(
    values: Sequence[Any],
    axis: int,
    distribution: ReplicaDistribution,
    workers: JaxWorkers | None,
) -> Any:
    """See `ReplicaGroup.gather`; the result is on every device of the group.

    There it can meet the variables as well as what `reduce` returned.
    """
    axes_of(axis, [tuple(np.shape(value)) for value in values])
    first = distribution.devices[0]
    whole = jnp.concatenate([jax.device_put(v, first) for v in values], axis=axis)
    if workers is not None:
        whole, _ = workers.gather("strategy.gather", whole, axis)
    return put(whole, distribution.everywhere)


def _reduced_in_program(reduce_op: ReduceOp, component: Any, axis: Any) -> Any:
    """`reduce` inside `merge_call`: one collective of the replicas' program."""
    axes = axes_of(axis, [tuple(component.shape)])
    component = addable(component)
    if axes:
        combine = jnp.sum if reduce_op is ReduceOp.SUM else jnp.mean
        component = combine(component, axis=axes)
    if reduce_op is ReduceOp.SUM:
        return jax.lax.psum(component, AXIS)
    return jax.lax.pmean(component, AXIS)
