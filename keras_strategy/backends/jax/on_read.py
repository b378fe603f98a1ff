"""Variables of which every replica keeps its own value until somebody reads.

Such a variable holds the aggregated value, so that whoever reads it outside gets that.
Beside it, what the replicas hold is kept as one array with the replicas in front, until
the variable is assigned outside: then the replicas' values follow from the one
assigned, a sum in equal parts, everything else as it is. One with aggregation "none"
reads as what replica 0 holds (tf.distribute refuses to read it).
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_strategy.backends.jax import keras_hooks
from keras_strategy.backends.jax.distribution import AXIS, ReplicaDistribution


def locals_of(variable: Any, distribution: ReplicaDistribution) -> jax.Array:
    """What the replicas hold, with the replicas in front."""
    value = keras_hooks.array_of(variable)
    aggregated, stacked = vars(variable).get("_ks_locals", (None, None))
    # Another array means that the variable was assigned outside since.
    if aggregated is value and stacked.sharding == distribution.split:
        return stacked
    value = jax.device_put(value, distribution.everywhere)
    return _spread(distribution.split, len(distribution.devices))(
        value, variable.aggregation == "sum"
    )


def remember(variable: Any, value: jax.Array, stacked: jax.Array) -> None:
    """Notes what the replicas hold, and its aggregate as the variable's value."""
    keras_hooks.set_array(variable, value)
    vars(variable)["_ks_locals"] = (value, stacked)


def assign_locals(
    variable: Any, values: Sequence[Any], distribution: ReplicaDistribution
) -> None:
    """Writes what each replica holds."""
    parts = [
        jax.device_put(value[None], device)
        for value, device in zip(values, distribution.devices, strict=True)
    ]
    shape = (len(parts), *parts[0].shape[1:])
    stacked = jax.make_array_from_single_device_arrays(shape, distribution.split, parts)
    if variable.aggregation == "sum":
        value = jnp.sum(stacked, axis=0)
    elif variable.aggregation == "mean":
        value = jnp.mean(stacked, axis=0).astype(stacked.dtype)
    else:
        value = stacked[0]
    remember(variable, jax.device_put(value, distribution.everywhere), stacked)


def aggregate(variable: Any, local: Any) -> Any:
    """What reading outside gives, computed in the replicas' program."""
    if variable.aggregation == "sum":
        return jax.lax.psum(local, AXIS)
    if variable.aggregation == "mean":
        return jax.lax.pmean(local, AXIS).astype(local.dtype)
    first = keras.ops.equal(jax.lax.axis_index(AXIS), 0)
    return jax.lax.psum(jnp.where(first, local, jnp.zeros_like(local)), AXIS)


@functools.cache
def _spread(split: Any, replicas: int) -> Any:
    def spread(value, parts):
        if not parts:
            return jnp.broadcast_to(value, (replicas, *value.shape))
        if jnp.issubdtype(value.dtype, jnp.integer):
            share, rest = value // replicas, value % replicas
        else:
            share, rest = value / replicas, jnp.zeros_like(value)
        stacked = jnp.broadcast_to(share, (replicas, *value.shape))
        return stacked.at[0].add(rest).astype(value.dtype)

    return jax.jit(spread, static_argnums=1, out_shardings=split)
