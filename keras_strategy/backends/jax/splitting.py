"""Local shards of variables, and the gathering of whole variables.

`rules.sharding` decides which variables are sharded, and along which dimension.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from keras_strategy.backends.jax import hooks_state as keras_state
from keras_strategy.backends.jax.distribution import AXIS, ReplicaDistribution, put
from keras_strategy.rules.sharding import dimension_to_shard


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
    """Return a whole variable on every device, outside of programs.

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
