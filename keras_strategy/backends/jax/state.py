"""Arrays of variables: donation, sync-on-read values and local shards.

A compiled program computes new values in the memory of the old ones (JAX donation),
which deletes the arrays it received. It may donate an array only if a program created
it for that variable and nobody has read it since: a reader of `variable.value` may keep
the array, or something that shares its memory. Every other array is copied first. That
happens once, since the program's output can be donated again. `ArrayNote` records this.

A sync-on-read variable holds the aggregated value. The replicas' values are kept beside
it as one array with a leading replica dimension, until the variable is assigned outside
of replicas: then `split_assigned_value` derives them from the assigned value. With
aggregation "none" the variable reads as replica 0's value.
"""

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.sharding import PartitionSpec

from keras_strategy.backends.jax import internals
from keras_strategy.backends.jax.collectives import sum_fn
from keras_strategy.backends.jax.distribution import AXIS, ReplicaDistribution, put
from keras_strategy.backends.jax.variables import (
    array_notes,
    gather_variable,
    no_array,
)
from keras_strategy.backends.threads.patches import unbuilt_variable_error
from keras_strategy.keras_patches.internals import stored_value
from keras_strategy.training.sharding import dimension_to_shard
from keras_strategy.training.variable_sync import is_sync_on_read, split_assigned_value

_REPLICA_VALUES = "_ks_replica_values"


def donatable_arrays(
    variables: Sequence[Any], distribution: ReplicaDistribution
) -> list[jax.Array]:
    """Return the arrays of distinct variables, for a program that may delete them."""
    arrays = list(map(stored_value, variables))
    # No function call per variable, here and below: there may be hundreds.
    for i, note in enumerate(array_notes(variables)):
        array = arrays[i]
        if array is None or note.donatable() is not array:
            arrays[i] = jnp.copy(_placed(variables[i], distribution))
    return arrays


def readable_arrays(
    variables: Sequence[Any], distribution: ReplicaDistribution
) -> list[jax.Array]:
    """Return the arrays of variables that a program only reads."""
    arrays = list(map(stored_value, variables))
    for i, note in enumerate(array_notes(variables)):
        array = arrays[i]
        if array is None or note.placed() is not array:
            placed = _placed(variables[i], distribution)
            if placed is array:
                note.placed, note.donatable = weakref.ref(placed), no_array
            arrays[i] = placed
    return arrays


def set_program_outputs(variables: Sequence[Any], arrays: Sequence[jax.Array]) -> None:
    internals.set_arrays(variables, arrays)
    for note, array in zip(array_notes(variables), arrays, strict=True):
        note.donatable = note.placed = weakref.ref(array)


def without_weak_type(array: Any) -> Any:
    """Return an array with a strong dtype, so that no step is traced again for it."""
    # A variable made from a Python number has a weak dtype, a program's output has not.
    if array.weak_type:
        return jax.lax.convert_element_type(array, array.dtype)
    return array


def array_with_value(variable: Any) -> jax.Array:
    array = stored_value(variable)
    if array is None:
        raise RuntimeError(
            f"{unbuilt_variable_error(variable)} On JAX, Keras keeps the values of the "
            "model's variables outside of the variables during an epoch of `fit`, and "
            "during `evaluate` and `predict`: call `strategy.run` after the epoch."
        )
    return array


def _placed(variable: Any, distribution: ReplicaDistribution) -> jax.Array:
    array = without_weak_type(array_with_value(variable))
    sharding = distribution.sharding_of(variable)
    is_placed = array.sharding.is_equivalent_to(sharding, array.ndim)
    return array if is_placed else put(array, sharding)


def replica_values(variable: Any, distribution: ReplicaDistribution) -> jax.Array:
    """Return the replicas' values, stacked along a leading replica dimension."""
    value = stored_value(variable)
    aggregated, stacked = vars(variable).get(_REPLICA_VALUES, (None, None))
    # A different array means that the variable was assigned outside of replicas.
    if aggregated is value and stacked.sharding == distribution.split:
        return stacked
    value = put(value, distribution.everywhere)
    first, other = split_assigned_value(variable, value, distribution.replicas)
    return _stack_fn(distribution.split, distribution.replicas)(first, other)


def set_replica_values(
    variables: Sequence[Any], values: Sequence[jax.Array], stacked: Sequence[jax.Array]
) -> None:
    """Set the variables to aggregated values and record the replicas' values."""
    internals.set_arrays(variables, values)
    for variable, *pair in zip(variables, values, stacked, strict=True):
        vars(variable)[_REPLICA_VALUES] = tuple(pair)


def set_components(
    variable: Any, values: Sequence[Any], distribution: ReplicaDistribution
) -> None:
    """Set a variable's components to arrays that no other code may donate."""
    values = list(map(jax.device_put, values, distribution.devices))
    if is_sync_on_read(variable):
        stacked = distribution.join_shards([x[None] for x in values])
        aggregate_stacked = _aggregate_fn(
            distribution.everywhere, distribution.topology.sums_in_tree
        )
        value = aggregate_stacked(stacked, variable.aggregation)
        set_replica_values([variable], [value], [stacked])
        return
    everywhere = distribution.everywhere
    array = distribution.global_array(tuple(variable.shape), everywhere, values)
    array = put(array, distribution.home or distribution.sharding_of(variable))
    internals.set_arrays([variable], [array])


def aggregate(variable: Any, value: Any) -> Any:
    """Aggregate the replicas' values inside of their program."""
    if variable.aggregation == "sum":
        return jax.lax.psum(value, AXIS)
    if variable.aggregation == "mean":
        return jax.lax.pmean(value, AXIS).astype(value.dtype)
    first = keras.ops.equal(jax.lax.axis_index(AXIS), 0)
    return jax.lax.psum(jnp.where(first, value, jnp.zeros_like(value)), AXIS)


@functools.cache
def _aggregate_fn(everywhere: Any, in_tree: bool) -> Any:
    def aggregate_stacked(stacked, aggregation):
        if aggregation not in ("sum", "mean"):
            return stacked[0]
        if aggregation == "mean" and not in_tree:
            return jnp.mean(stacked, axis=0).astype(stacked.dtype)
        (total,) = sum_fn(everywhere, in_tree)([stacked])
        if aggregation == "mean":
            return (total / len(stacked)).astype(stacked.dtype)
        return total

    return jax.jit(aggregate_stacked, static_argnums=1, out_shardings=everywhere)


@functools.cache
def _stack_fn(split: Any, replicas: int) -> Any:
    def stack(first, other):
        stacked = jnp.broadcast_to(other, (replicas, *other.shape))
        return stacked.at[0].set(first)

    return jax.jit(stack, out_shardings=split)


def partition_specs(dims: Sequence[int | None]) -> list[PartitionSpec]:
    return [
        PartitionSpec() if d is None else PartitionSpec(*[None] * d, AXIS) for d in dims
    ]


class LocalShards:
    """Whole tensors, which code in a trace sees, and their local shards."""

    def __init__(self, distribution: ReplicaDistribution):
        self.replicas = distribution.replicas
        # On CPUs of several workers, gloo's reduce-scatter waits 30 s for the others at
        # most, and can return wrong values: jax-ml/jax issues 40831 and 40830.
        self._scatters = not distribution.synchronous
        # Keyed by the id of the whole tensor, which is kept so that the id stays valid.
        # If only the original shard is used, XLA drops the all-gather.
        self._gathered: dict[int, tuple[Any, int, Any]] = {}

    def gather(self, shard: Any, dim: int | None) -> Any:
        """All-gather the replicas' shards along a dimension; None means unsharded."""
        if dim is None:
            return shard
        tensor = jax.lax.all_gather(shard, AXIS, axis=dim, tiled=True)
        self._gathered[id(tensor)] = tensor, dim, shard
        return tensor

    def shard(self, tensor: Any, dim: int | None) -> Any:
        """Return this replica's shard of a whole tensor, the inverse of `gather`."""
        if dim is None:
            return tensor
        gathered = self._gathered.get(id(tensor))
        if gathered is not None and gathered[1] == dim:
            return gathered[2]
        size = tensor.shape[dim] // self.replicas
        start = jax.lax.axis_index(AXIS) * size
        return jax.lax.dynamic_slice_in_dim(tensor, start, size, dim)

    def all_reduce(self, tensors: Sequence[Any]) -> list[Any]:
        """Sum tensors over the replicas, by reduce-scatter where shapes allow."""
        if not self._scatters:
            return jax.lax.psum(tensors, AXIS)
        dims = [dimension_to_shard(x.shape, self.replicas) for x in tensors]
        unsharded = [x for x, d in zip(tensors, dims, strict=True) if d is None]
        totals = iter(jax.lax.psum(unsharded, AXIS))
        return [
            next(totals)
            if d is None
            else self.gather(
                jax.lax.psum_scatter(x, AXIS, scatter_dimension=d, tiled=True), d
            )
            for x, d in zip(tensors, dims, strict=True)
        ]


def read_components(
    variable: Any, distribution: ReplicaDistribution
) -> tuple[jax.Array, ...]:
    """Return the local replicas' values of a variable, which may share its memory."""
    if is_sync_on_read(variable):
        stacked = replica_values(variable, distribution)
        return tuple(x[0] for x in distribution.local_shards(stacked))
    array = stored_value(variable)
    if array.sharding.is_fully_replicated:
        array = put(array, distribution.everywhere)
    else:
        array = gather_variable(variable, distribution)
    return distribution.local_shards(array)
