"""Distributed values stored as one global array."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_strategy.backends.jax.distribution import ReplicaDistribution
from keras_strategy.data.local_rows import EvenRows
from keras_strategy.values import DistributedValues, PerReplica


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
