"""Sync-on-read variables: one value per replica, aggregated when read.

The variable holds the aggregated value, so reading it outside of replicas returns that.
The replicas' values are kept beside it as one array with a leading replica dimension,
until the variable is assigned outside of replicas: then `split_assigned_value` derives the
replicas' values from the assigned one. A variable with aggregation "none" reads as
replica 0's value (tf.distribute refuses to read it).
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_strategy.backends.jax import hooks_state as keras_state
from keras_strategy.backends.jax.distribution import AXIS, ReplicaDistribution, put
from keras_strategy.rules.aggregation import split_assigned_value


def replica_values(variable: Any, distribution: ReplicaDistribution) -> jax.Array:
    """Return the replicas' values, stacked along a leading replica dimension."""
    value = keras_state.array_of(variable)
    aggregated, stacked = vars(variable).get("_ks_locals", (None, None))
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
        vars(variable)["_ks_locals"] = tuple(pair)


def set_local_values(
    variable: Any, values: Sequence[Any], distribution: ReplicaDistribution
) -> None:
    """Set the variable from the values of this worker's replicas."""
    stacked = distribution.join_shards([x[None] for x in values])
    value = _aggregate_fn(distribution.everywhere)(stacked, variable.aggregation)
    set_replica_values([variable], [value], [stacked])


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
