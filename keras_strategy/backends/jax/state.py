"""Arrays of variables: donation, sync-on-read values and local shards.

A compiled program computes new values in the memory of the old ones (JAX donation),
which deletes the arrays it received. It may donate an array only if a program created
it for that variable and nobody has read it since: a reader of `variable.value` may keep
the array, or something that shares its memory, such as a shard or a result of
`jax.device_put`. Every other array is copied first. That happens once, since the
program's output can be donated again. `ArrayNote` records this.

A sync-on-read variable holds the aggregated value, so reading it outside of replicas
returns that. The replicas' values are kept beside it as one array with a leading
replica dimension, until the variable is assigned outside of replicas: then
`split_assigned_value` derives them from the assigned value. A variable with aggregation
"none" reads as replica 0's value (tf.distribute refuses to read it).

`training.sharding` decides which variables are sharded, and along which dimension.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import PartitionSpec

from keras_strategy.backends.jax import patches_state as keras_state
from keras_strategy.backends.jax.distribution import AXIS, ReplicaDistribution, put
from keras_strategy.backends.threads.scopes import unbuilt_variable_error
from keras_strategy.training.sharding import dimension_to_shard
from keras_strategy.training.variable_sync import is_sync_on_read, split_assigned_value

_NOTE, _REPLICA_VALUES = "_ks_array_note", "_ks_replica_values"
_get_note: Callable[[Any], Any] = attrgetter(_NOTE)

# A reference that equals no array.
no_array: Callable[[], Any] = object


class ArrayNote:
    """Facts about the array that a variable holds.

    Weak references, which do not match an array that the variable received later.

    Attributes:
        placed: Returns the array if it has the sharding that programs need.
        donatable: Returns the array if a program may donate it.
    """

    __slots__ = ("donatable", "placed")

    def __init__(self):
        self.donatable: Callable[[], Any] = no_array
        self.placed: Callable[[], Any] = no_array


def array_notes(variables: Sequence[Any]) -> list[ArrayNote]:
    """Return the notes of variables."""
    try:
        return list(map(_get_note, variables))
    except AttributeError:  # a variable without a note
        return [vars(v).setdefault(_NOTE, ArrayNote()) for v in variables]


def forbid_donation(variable: Any) -> None:
    """Record that other code may hold the variable's array or a part of it."""
    note = vars(variable).get(_NOTE)
    if note is not None:
        note.donatable = no_array


def discard_note(variable: Any) -> None:
    """Remove the note of the variable."""
    vars(variable).pop(_NOTE, None)


def donatable_arrays(
    variables: Sequence[Any], sharding_of: Callable[[Any], Any]
) -> list[jax.Array]:
    """Return the arrays of distinct variables, which the program may delete.

    `sharding_of` returns the sharding that the program was compiled for.
    """
    arrays = keras_state.arrays_of(variables)
    # No function call per variable, here and below: there may be hundreds.
    for i, note in enumerate(array_notes(variables)):
        array = arrays[i]
        if array is None or note.donatable() is not array:
            arrays[i] = jnp.copy(_placed(variables[i], array, sharding_of))
    return arrays


def readable_arrays(
    variables: Sequence[Any], sharding_of: Callable[[Any], Any]
) -> list[jax.Array]:
    """Return the arrays of variables that a program only reads."""
    arrays = keras_state.arrays_of(variables)
    for i, note in enumerate(array_notes(variables)):
        array = arrays[i]
        if array is None or note.placed() is not array:
            placed = _placed(variables[i], array, sharding_of)
            if placed is array:
                note.placed, note.donatable = weakref.ref(placed), no_array
            arrays[i] = placed
    return arrays


def set_program_outputs(variables: Sequence[Any], arrays: Sequence[jax.Array]) -> None:
    """Set variables to the arrays that a program created for them."""
    keras_state.set_arrays(variables, arrays)
    for note, array in zip(array_notes(variables), arrays, strict=True):
        note.donatable = note.placed = weakref.ref(array)


def without_weak_type(array: Any) -> Any:
    """Return the array with a strong dtype.

    A variable made from a Python number has a weak dtype. The program would be traced
    again when the first step has replaced it.
    """
    if not array.weak_type:
        return array
    return jax.lax.convert_element_type(array, array.dtype)


def no_value_error(variable: Any) -> RuntimeError:
    """Return the error for a variable that holds no array."""
    return RuntimeError(
        f"{unbuilt_variable_error(variable)} On JAX, Keras keeps the values of the "
        "model's variables outside of the variables during an epoch of `fit`, and "
        "during `evaluate` and `predict`: call `strategy.run` after the epoch."
    )


def _placed(
    variable: Any, value: jax.Array | None, sharding_of: Callable[[Any], Any]
) -> jax.Array:
    if value is None:
        raise no_value_error(variable)
    array: jax.Array = without_weak_type(value)
    sharding = sharding_of(variable)
    if array.sharding.is_equivalent_to(sharding, array.ndim):
        return array
    return put(array, sharding)


def replica_values(variable: Any, distribution: ReplicaDistribution) -> jax.Array:
    """Return the replicas' values, stacked along a leading replica dimension."""
    value = keras_state.array_of(variable)
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
    keras_state.set_arrays(variables, values)
    for variable, *pair in zip(variables, values, stacked, strict=True):
        vars(variable)[_REPLICA_VALUES] = tuple(pair)


def set_components(
    variable: Any, values: Sequence[Any], distribution: ReplicaDistribution
) -> None:
    """Set the components of a variable on this worker's replicas.

    `values` must not be arrays that other code may donate.
    """
    pairs = zip(values, distribution.devices, strict=True)
    values = [jax.device_put(value, device) for value, device in pairs]
    if is_sync_on_read(variable):
        stacked = distribution.join_shards([x[None] for x in values])
        value = _aggregate_fn(distribution.everywhere)(stacked, variable.aggregation)
        set_replica_values([variable], [value], [stacked])
        return
    everywhere = distribution.everywhere
    array = distribution.global_array(tuple(variable.shape), everywhere, values)
    array = put(array, distribution.stored_sharding(variable))
    keras_state.set_array(variable, array)


def aggregate(variable: Any, value: Any) -> Any:
    """Aggregate the replicas' values inside of their program."""
    if variable.aggregation == "sum":
        return jax.lax.psum(value, AXIS)
    if variable.aggregation == "mean":
        return jax.lax.pmean(value, AXIS).astype(value.dtype)
    first = keras.ops.equal(jax.lax.axis_index(AXIS), 0)
    return jax.lax.psum(jnp.where(first, value, jnp.zeros_like(value)), AXIS)


@functools.cache
def _aggregate_fn(everywhere: Any) -> Any:
    def aggregate_stacked(stacked, aggregation):
        if aggregation == "sum":
            return jnp.sum(stacked, axis=0, dtype=stacked.dtype)
        if aggregation == "mean":
            return jnp.mean(stacked, axis=0).astype(stacked.dtype)
        return stacked[0]

    return jax.jit(aggregate_stacked, static_argnums=1, out_shardings=everywhere)


@functools.cache
def _stack_fn(split: Any, replicas: int) -> Any:
    def stack(first, other):
        stacked = jnp.broadcast_to(other, (replicas, *other.shape))
        return stacked.at[0].set(first)

    return jax.jit(stack, out_shardings=split)


def partition_specs(dims: Sequence[int | None]) -> list[PartitionSpec]:
    """Return the PartitionSpecs of variables, given their sharded dimensions."""
    return [
        PartitionSpec() if d is None else PartitionSpec(*[None] * d, AXIS) for d in dims
    ]


class LocalShards:
    """Whole tensors and their local shards in a trace.

    Code that the trace calls sees whole tensors. If it asks for the shard of a gathered
    tensor, it gets the original shard, and XLA drops the unused all-gather.

    Args:
        replicas: The number of replicas over all workers.
    """

    def __init__(self, replicas: int):
        self.replicas = replicas
        # Keyed by the id of the whole tensor, which is kept so that the id stays valid.
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


def assemble_locally(array: jax.Array) -> np.ndarray | None:
    """Assemble a sharded array without communication.

    Returns:
        The array; None unless every process holds all of its shards. If only some do,
        all processes have to gather it.
    """
    by_process: dict[int, set[str]] = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        by_process.setdefault(device.process_index, set()).add(str(index))
    if len(set(map(frozenset, by_process.values()))) > 1:
        return None
    result = np.empty(array.shape, array.dtype)
    for shard in {str(s.index): s for s in array.addressable_shards}.values():
        result[shard.index] = shard.data
    return result


def gather_variable(variable: Any, distribution: ReplicaDistribution) -> jax.Array:
    """Gather a variable on every device, outside of programs.

    A collective, unless each worker holds all shards of the variable.
    """
    array = keras_state.array_of(variable)
    if distribution.cluster is None:
        return put(array, distribution.everywhere)
    local = assemble_locally(array)
    if local is not None:
        return put(local, distribution.everywhere)
    with distribution.cluster.client.track_operation(f"gathering '{variable.path}'"):
        return jax.block_until_ready(put(array, distribution.everywhere))
