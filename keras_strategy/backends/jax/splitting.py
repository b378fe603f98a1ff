"""Variables that the devices share: each keeps a part, and a program makes them whole.

Which variables these are, and along which dimension, is in `rules.sharding`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from keras_strategy.backends.jax import hooks_state as keras_state
from keras_strategy.backends.jax.distribution import AXIS, ReplicaDistribution, put
from keras_strategy.rules.sharding import dimension_to_split

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


class Parts:
    """What is known, in a trace, of both the whole and the part that a replica keeps.

    Code that the trace calls sees wholes. Where it comes to the part of one, that is
    taken as it is, and the whole, which nobody uses then, is not computed.

    Args:
        replicas: Their number, over all workers.
    """

    def __init__(self, replicas: int):
        self.replicas = replicas
        # By the whole's `id`; with it, so that no other has this `id`.
        self._known: dict[int, tuple[Any, int, Any]] = {}

    def whole(self, part: Any, dimension: int | None) -> Any:
        """The whole of what each replica has a part of.

        Args:
            part: That of the replica that is traced.
            dimension: Along which dimension; None if it is the whole.
        """
        if dimension is None:
            return part
        whole = jax.lax.all_gather(part, AXIS, axis=dimension, tiled=True)
        self._known[id(whole)] = whole, dimension, part
        return whole

    def own(self, whole: Any, dimension: int | None) -> Any:
        """What the replica that is traced has of a whole, see `whole`."""
        if dimension is None:
            return whole
        known = self._known.get(id(whole))
        if known is not None and known[1] == dimension:
            return known[2]
        size = whole.shape[dimension] // self.replicas
        start = jax.lax.axis_index(AXIS) * size
        return jax.lax.dynamic_slice_in_dim(whole, start, size, dimension)

    def summed(self, tensors: Sequence[Any]) -> list[Any]:
        """The sums over the replicas, of which each computes a part where it can."""
        along = [dimension_to_split(x.shape, self.replicas) for x in tensors]
        others = [x for x, d in zip(tensors, along, strict=True) if d is None]
        rest = iter(jax.lax.psum(others, AXIS))
        return [
            next(rest)
            if d is None
            else self.whole(
                jax.lax.psum_scatter(x, AXIS, scatter_dimension=d, tiled=True), d
            )
            for x, d in zip(tensors, along, strict=True)
        ]


def whole_here(array: jax.Array) -> np.ndarray | None:
    """The whole of an array of which every process has all parts; else None.

    Where some have and others not, all of them bring it together.
    """
    of_processes: dict[int, set[str]] = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        of_processes.setdefault(device.process_index, set()).add(str(index))
    if len(set(map(frozenset, of_processes.values()))) > 1:
        return None
    parts = {str(shard.index): shard for shard in array.addressable_shards}
    whole = np.empty(array.shape, array.dtype)
    for shard in parts.values():
        whole[shard.index] = shard.data
    return whole


def gathered_whole(variable: Any, distribution: ReplicaDistribution) -> jax.Array:
    """The whole of a variable on every device, outside of programs.

    All workers ask, unless each of them has all parts of it.
    """
    array = keras_state.array_of(variable)
    if distribution.cluster is None:
        return put(array, distribution.everywhere)
    here = whole_here(array)
    if here is not None:
        return put(here, distribution.everywhere)
    with distribution.cluster.member.waiting(f"the whole of '{variable.path}'"):
        return jax.block_until_ready(put(array, distribution.everywhere))
