"""Collectives between the processes of a cluster, outside of programs.

Inside a program, XLA's collectives include the other processes. These combine values
that each process holds by itself.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from keras_strategy.backends.jax.distribution import ReplicaDistribution
from keras_strategy.cluster.membership import Cluster
from keras_strategy.core.collectives import (
    WorkerCollectives,
    describe_layouts,
    operation_kind,
)


class JaxWorkers(WorkerCollectives):
    """Implementation of `core.workers.Workers` on JAX."""

    def __init__(self, cluster: Cluster, distribution: ReplicaDistribution):
        super().__init__(cluster)
        self._distribution = distribution

    def sum_all(self, name: str, tensors: Sequence[Any]) -> list[jax.Array]:
        tensors = [jnp.asarray(tensor) for tensor in tensors]
        specs = [[list(t.shape), str(t.dtype)] for t in tensors]
        different = self.cluster.values_if_different(operation_kind(name), specs)
        if different is not None:
            received = self.cluster.format_by_worker(map(describe_layouts, different))
            raise ValueError(
                f"`{name}` needs values whose shapes and dtypes are the same on every "
                f"worker. Received: {received}."
            )
        with self.track_operation(name):
            stacked = [self._stack_workers(tensor) for tensor in tensors]
            totals = _sum_fn(self._distribution.everywhere)(stacked)
            jax.block_until_ready(totals)
        return [self._local(total) for total in totals]

    def gather(self, name: str, tensor: Any, axis: int) -> tuple[jax.Array, list[int]]:
        tensor = jnp.asarray(tensor)
        spec = [list(tensor.shape), str(tensor.dtype)]
        specs = self.cluster.exchange(operation_kind(name), spec)
        # A tensor without this axis differs from the others in rank.
        axis %= max(tensor.ndim, 1)
        others = {(*s[:axis], "", *s[axis + 1 :], dtype) for s, dtype in specs}
        if len(others) > 1 or tensor.ndim == 0:
            raise self.refusal(name, [name], specs, f" other than axis {axis}")
        counts = [shape[axis] for shape, _ in specs]
        devices = self._distribution.devices
        # Pad to equally many rows per device.
        size = -(-max(counts) // len(devices))
        rows = jnp.moveaxis(tensor, axis, 0)
        missing = size * len(devices) - rows.shape[0]
        rows = jnp.pad(rows, [(0, missing)] + [(0, 0)] * (rows.ndim - 1))
        shards = [
            jax.device_put(rows[i * size : (i + 1) * size], device)
            for i, device in enumerate(devices)
        ]
        with self.track_operation(name):
            split = self._distribution.join_shards(shards)
            padded = _replicate_fn(self._distribution.everywhere)(split)
            jax.block_until_ready(padded)
        block = size * len(devices)
        padded = self._local(padded)
        parts = [
            padded[worker * block : worker * block + count]
            for worker, count in enumerate(counts)
        ]
        return jnp.moveaxis(jnp.concatenate(parts), 0, axis), counts

    def broadcast(self, name: str, tensors: Sequence[Any]) -> list[Any]:
        with self.track_operation(name):
            arrays = [np.asarray(tensor) for tensor in tensors]
            return multihost_utils.broadcast_one_to_all(arrays)

    def _stack_workers(self, tensor: jax.Array) -> jax.Array:
        """Stack the workers' tensors, with zeros for all devices but the first."""
        first, *others = self._distribution.devices
        parts = [jax.device_put(tensor[None], first)]
        if others:
            zeros = np.zeros((1, *tensor.shape), tensor.dtype)
            parts += [jax.device_put(zeros, device) for device in others]
        return self._distribution.join_shards(parts)

    def _local(self, array: jax.Array) -> jax.Array:
        first = self._distribution.devices[0]
        return next(s.data for s in array.addressable_shards if s.device == first)


@functools.cache
def _sum_fn(everywhere: Any) -> Any:
    def sums(stacked):
        return [jnp.sum(x, axis=0, dtype=x.dtype) for x in stacked]

    return jax.jit(sums, out_shardings=everywhere)


@functools.cache
def _replicate_fn(everywhere: Any) -> Any:
    return jax.jit(lambda x: x, out_shardings=everywhere)
