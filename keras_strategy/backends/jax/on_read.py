"""Variables of which every replica keeps its own value until somebody reads.

Such a variable holds the aggregated value, so that whoever reads it outside gets that.
Beside it, what the replicas hold is kept as one array with the replicas in front, until
the variable is assigned outside: then the replicas' values follow from the one
assigned, see `rules.aggregation.parts_outside`. One with aggregation "none"
reads as what replica 0 holds (tf.distribute refuses to read it).
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_strategy.backends.jax import hooks_state as keras_state
from keras_strategy.backends.jax.distribution import AXIS, ReplicaDistribution, put
from keras_strategy.rules.aggregation import parts_outside


def locals_of(variable: Any, distribution: ReplicaDistribution) -> jax.Array:
    """What the replicas hold, with the replicas in front."""
    value = keras_state.array_of(variable)
    aggregated, stacked = vars(variable).get("_ks_locals", (None, None))
    # Another array means that the variable was assigned outside since.
    if aggregated is value and stacked.sharding == distribution.split:
        return stacked
    value = put(value, distribution.everywhere)
    parts = parts_outside(variable, value, distribution.replicas)
    return _spread(distribution.split, distribution.replicas)(*parts)


def remember(
    variables: Sequence[Any], values: Sequence[jax.Array], stacked: Sequence[jax.Array]
) -> None:
    """Notes what the replicas hold, and its aggregate as each variable's value."""
    keras_state.set_arrays(variables, values)
    for variable, *pair in zip(variables, values, stacked, strict=True):
        vars(variable)["_ks_locals"] = tuple(pair)


def remember_parts(
    variable: Any, parts: Sequence[Any], distribution: ReplicaDistribution
) -> None:
    """Notes what each replica holds, given one array on each device."""
    stacked = distribution.joined([x[None] for x in parts])
    value = _joined(distribution.everywhere)(stacked, variable.aggregation)
    remember([variable], [value], [stacked])


def aggregate(variable: Any, local: Any) -> Any:
    """What reading outside gives, computed in the replicas' program."""
    if variable.aggregation == "sum":
        return jax.lax.psum(local, AXIS)
    if variable.aggregation == "mean":
        return jax.lax.pmean(local, AXIS).astype(local.dtype)
    first = keras.ops.equal(jax.lax.axis_index(AXIS), 0)
    return jax.lax.psum(jnp.where(first, local, jnp.zeros_like(local)), AXIS)


@functools.cache
def _joined(everywhere: Any) -> Any:
    def joined(stacked, aggregation):
        if aggregation == "sum":
            return jnp.sum(stacked, axis=0, dtype=stacked.dtype)
        if aggregation == "mean":
            return jnp.mean(stacked, axis=0).astype(stacked.dtype)
        return stacked[0]

    return jax.jit(joined, static_argnums=1, out_shardings=everywhere)


@functools.cache
def _spread(split: Any, replicas: int) -> Any:
    def spread(first, other):
        stacked = jnp.broadcast_to(other, (replicas, *other.shape))
        return stacked.at[0].set(first)

    return jax.jit(spread, out_shardings=split)
