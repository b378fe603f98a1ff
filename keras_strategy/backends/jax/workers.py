"""Values that travel between the processes of a cluster, outside of programs.

Inside a program XLA's collectives take care of the other processes. These are for what
each process holds by itself.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from keras_strategy.backends.jax.distribution import ReplicaDistribution
from keras_strategy.core.workers import Workers, described, kind_of
from keras_strategy.workers.cluster import Cluster


class JaxWorkers(Workers):
    """See `core.workers.Workers`. Tensors are on this process's devices alone.

    Args:
        cluster: The workers.
        distribution: The layouts of all their replicas.
    """

    def __init__(self, cluster: Cluster, distribution: ReplicaDistribution):
        super().__init__(cluster)
        self._distribution = distribution

    def sum_all(self, name: str, tensors: Sequence[Any]) -> list[jax.Array]:
        tensors = [jnp.asarray(tensor) for tensor in tensors]
        layouts = [[list(t.shape), str(t.dtype)] for t in tensors]
        told = self.cluster.differences(kind_of(name), layouts)
        if told is not None:
            raise ValueError(
                f"`{name}` needs values whose shapes and dtypes are the same on every "
                f"worker. Received: {self.cluster.listed(map(described, told))}."
            )
        with self.waiting(name):
            stacked = [self._one_for_each_device(tensor) for tensor in tensors]
            totals = _sums(self._distribution.everywhere)(stacked)
            jax.block_until_ready(totals)
        return [self._local(total) for total in totals]

    def gather(self, name: str, tensor: Any, axis: int) -> tuple[jax.Array, list[int]]:
        tensor = jnp.asarray(tensor)
        mine = [list(tensor.shape), str(tensor.dtype)]
        told = self.cluster.agree(kind_of(name), mine)
        # One that has no such axis differs from the others by its number of axes.
        axis %= max(tensor.ndim, 1)
        others = {(*s[:axis], "", *s[axis + 1 :], dtype) for s, dtype in told}
        if len(others) > 1 or tensor.ndim == 0:
            raise self.refusal(name, [name], told, f" other than axis {axis}")
        counts = [shape[axis] for shape, _ in told]
        devices = self._distribution.devices
        # As many rows on each device, for which they are padded.
        share = -(-max(counts) // len(devices))
        rows = jnp.moveaxis(tensor, axis, 0)
        missing = share * len(devices) - rows.shape[0]
        rows = jnp.pad(rows, [(0, missing)] + [(0, 0)] * (rows.ndim - 1))
        parts = [
            jax.device_put(rows[i * share : (i + 1) * share], device)
            for i, device in enumerate(devices)
        ]
        with self.waiting(name):
            split = self._distribution.joined(parts)
            whole = _copies(self._distribution.everywhere)(split)
            jax.block_until_ready(whole)
        block = share * len(devices)
        whole = self._local(whole)
        pieces = [
            whole[worker * block : worker * block + count]
            for worker, count in enumerate(counts)
        ]
        return jnp.moveaxis(jnp.concatenate(pieces), 0, axis), counts

    def broadcast(self, name: str, tensors: Sequence[Any]) -> list[Any]:
        with self.waiting(name):
            arrays = [np.asarray(tensor) for tensor in tensors]
            return multihost_utils.broadcast_one_to_all(arrays)

    def _one_for_each_device(self, tensor: jax.Array) -> jax.Array:
        """A global array of which the first device of each worker has the tensor."""
        first, *others = self._distribution.devices
        parts = [jax.device_put(tensor[None], first)]
        if others:
            nothing = np.zeros((1, *tensor.shape), tensor.dtype)
            parts += [jax.device_put(nothing, device) for device in others]
        return self._distribution.joined(parts)

    def _local(self, array: jax.Array) -> jax.Array:
        first = self._distribution.devices[0]
        return next(s.data for s in array.addressable_shards if s.device == first)


@functools.cache
def _sums(everywhere: Any) -> Any:
    def sums(stacked):
        return [jnp.sum(x, axis=0, dtype=x.dtype) for x in stacked]

    return jax.jit(sums, out_shardings=everywhere)


@functools.cache
def _copies(everywhere: Any) -> Any:
    return jax.jit(lambda x: x, out_shardings=everywhere)
