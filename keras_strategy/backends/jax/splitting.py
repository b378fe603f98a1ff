"""Variables that the devices share: each keeps a part, and a program makes them whole.

Which variables these are, and along which dimension, is in `rules.sharding`.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from keras_strategy.backends.jax import hooks_state as keras_state
from keras_strategy.backends.jax.distribution import AXIS, ReplicaDistribution, put

Along = Sequence[int | None]


def specs(along: Along) -> list[PartitionSpec]:
    """How a program is given variables.

    Args:
        along: For each, along which dimension it is split; None if it is whole.
    """
    return [
        PartitionSpec() if d is None else PartitionSpec(*[None] * d, AXIS)
        for d in along
    ]


def wholes(values: Sequence[Any], along: Along) -> list[Any]:
    """The whole of each variable, in a program; what nobody uses is not computed."""
    return [
        x if d is None else jax.lax.all_gather(x, AXIS, axis=d, tiled=True)
        for x, d in zip(values, along, strict=True)
    ]


def own_parts(values: Sequence[Any], along: Along) -> list[Any]:
    """What the replica that is traced keeps of the whole of each variable."""
    return [
        x if d is None else own_part(x, d) for x, d in zip(values, along, strict=True)
    ]


def own_part(value: Any, dimension: int) -> Any:
    """What the replica that is traced keeps of a whole."""
    size = value.shape[dimension] // jax.lax.psum(1, AXIS)
    start = jax.lax.axis_index(AXIS) * size
    return jax.lax.dynamic_slice_in_dim(value, start, size, dimension)


def gathered_whole(variable: Any, distribution: ReplicaDistribution) -> jax.Array:
    """The whole of a variable on every device, outside of programs; all workers ask."""
    array = keras_state.array_of(variable)
    if distribution.cluster is None:
        return put(array, distribution.everywhere)
    with distribution.cluster.member.waiting(f"the whole of '{variable.path}'"):
        return jax.block_until_ready(put(array, distribution.everywhere))
