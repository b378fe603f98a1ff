"""Collectives between workers, and distributed values as global arrays.

Inside a program, XLA's collectives include the other processes. `JaxWorkers` combines
values that each process holds by itself.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from keras_strategy.backends.jax.distribution import AXIS, ReplicaDistribution, put
from keras_strategy.cluster.membership import Cluster
from keras_strategy.core.collectives import (
    WorkerCollectives,
    describe_layouts,
    operation_kind,
)
from keras_strategy.training.reduction import sum_in_tree
from keras_strategy.values import DistributedValues, PerReplica


class JaxWorkers(WorkerCollectives):
    def __init__(self, cluster: Cluster, distribution: ReplicaDistribution):
        super().__init__(cluster)
        self._distribution = distribution
        if distribution.synchronous:
            # gloo connects devices at their first collective, and waits 30 s for it:
            # shorter than the program of another worker may compile.
            with self.track_operation("the first collective"):
                one_each = put(
                    np.ones(distribution.mesh.shape[AXIS]), distribution.split
                )
                jax.block_until_ready(
                    sum_fn(distribution.everywhere, False)([one_each])
                )

    def sum_all(self, name: str, tensors: Sequence[Any]) -> list[jax.Array]:
        tensors = [jnp.asarray(tensor) for tensor in tensors]
        # With zeros for all devices but the first.
        zeros = [[jnp.zeros_like(t) for t in tensors]] * len(self._distribution.devices)
        return sum_replicas(name, self._distribution, [tensors, *zeros[1:]])

    def gather(self, name: str, tensor: Any, axis: int) -> tuple[jax.Array, list[int]]:
        tensor = jnp.asarray(tensor)
        spec = [list(tensor.shape), str(tensor.dtype)]
        specs = self.cluster.exchange(operation_kind(name), spec)
        # A tensor without this axis differs from the others in rank.
        axis %= max(tensor.ndim, 1)
        others = {(*s[:axis], "", *s[axis + 1 :], dtype) for s, dtype in specs}
        if len(others) > 1 or tensor.ndim == 0:
            raise self.calls_differ_error(
                name, [name], specs, f" other than axis {axis}"
            )
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
            padded = jax.block_until_ready(put(split, self._distribution.everywhere))
        padded = self._distribution.local_shards(padded)[0]
        block = size * len(devices)
        parts = [
            padded[worker * block : worker * block + count]
            for worker, count in enumerate(counts)
        ]
        return jnp.moveaxis(jnp.concatenate(parts), 0, axis), counts

    def broadcast(self, name: str, tensors: Sequence[Any]) -> list[Any]:
        with self.track_operation(name):
            arrays = [np.asarray(tensor) for tensor in tensors]
            return multihost_utils.broadcast_one_to_all(arrays)


def sum_replicas(
    name: str,
    distribution: ReplicaDistribution,
    by_replica: Sequence[Sequence[jax.Array]],
) -> list[jax.Array]:
    """Sum the tensors of all replicas, given those of each local one."""
    workers = distribution.workers
    if workers is None:
        return _sum_replicas(distribution, by_replica)
    specs = [[list(t.shape), str(t.dtype)] for t in by_replica[0]]
    different = workers.cluster.values_if_different(operation_kind(name), specs)
    if different is not None:
        received = workers.cluster.format_by_worker(map(describe_layouts, different))
        raise ValueError(
            f"`{name}` needs values whose shapes and dtypes are the same on every "
            f"worker. Received: {received}."
        )
    with workers.track_operation(name):
        return jax.block_until_ready(_sum_replicas(distribution, by_replica))


def _sum_replicas(
    distribution: ReplicaDistribution, by_replica: Sequence[Sequence[jax.Array]]
) -> list[jax.Array]:
    def stack(*tensors):
        shards = map(jax.device_put, tensors, distribution.devices)
        return distribution.join_shards([shard[None] for shard in shards])

    stacked = list(map(stack, *by_replica))
    totals = sum_fn(distribution.everywhere, distribution.topology.sums_in_tree)(
        stacked
    )
    return [distribution.local_shards(total)[0] for total in totals]


@functools.cache
def sum_fn(everywhere: Any, in_tree: bool) -> Any:
    """Return a program that sums arrays over their first axis."""

    def sums(stacked):
        if not in_tree:
            return [jnp.sum(x, axis=0, dtype=x.dtype) for x in stacked]
        stacked = jax.lax.with_sharding_constraint(stacked, everywhere)
        return [
            sum_in_tree(
                range(len(x)), {range(i, i + 1): x[i] for i in range(len(x))}, jnp.add
            )
            for x in stacked
        ]

    return jax.jit(sums, out_shardings=everywhere)


class ShardedPerReplica(PerReplica):
    """PerReplica value whose components are the shards of one global array."""

    # The array concatenates the replicas' tensors by rows, or stacks scalars. `total`
    # is the components' sum on every device, if a program returned it.

    def __init__(
        self,
        array: jax.Array,
        scalars: bool,
        distribution: Any,
        total: jax.Array | None = None,
    ):
        self.array, self.scalars, self.total = array, scalars, total
        self.count, self.distribution = len(distribution.devices), distribution

    def belongs_to(self, distribution: ReplicaDistribution) -> bool:
        """Return True if the group's devices hold one component each."""
        return self.distribution.mesh == distribution.mesh

    @property
    def values(self) -> tuple[Any, ...]:
        values = self.distribution.local_shards(self.array)
        return tuple(x.reshape(()) for x in values) if self.scalars else values

    def __repr__(self) -> str:
        return repr(PerReplica(self.values))

    def __reduce__(self):
        return PerReplica, (tuple(np.asarray(value) for value in self.values),)


class UnevenPerReplica(PerReplica):
    """PerReplica value whose layouts differ on some worker, as all workers know."""


class LocalBatches(PerReplica):
    """The local batches of a global batch that virtual replicas do not divide."""

    # Structures for JAX, whose static parts may differ, too. `first` is that of the
    # first replica of all workers.

    def __init__(self, batches: Sequence[Any], first: Any, rows: int):
        super().__init__(batches)
        self.first, self.rows = first, rows
        self.layouts = tuple(map(layout_of, batches))


def layout_of(batch: Any) -> tuple[Any, ...]:
    """Return what a program is compiled for."""
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def shapes_and_dtypes(values: Sequence[Any]) -> list[tuple[tuple[int, ...], str]]:
    return [
        (tuple(np.shape(value)), str(jax.dtypes.result_type(value))) for value in values
    ]


def is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | np.generic | int | float)


def to_sharded(
    value: DistributedValues, distribution: ReplicaDistribution
) -> ShardedPerReplica:
    """Put components of equal shape and dtype on their devices, as one array."""
    if isinstance(value, ShardedPerReplica) and value.belongs_to(distribution):
        return value
    values = list(value.values)
    scalars = np.ndim(values[0]) == 0
    if scalars:
        values = [jnp.reshape(jnp.asarray(v), (1,)) for v in values]
    dtype = jnp.result_type(*values)
    # Converted first: NumPy's int64 becomes JAX's default integer.
    shards = [
        jax.device_put(jnp.asarray(v, dtype=dtype), device)
        for v, device in zip(values, distribution.devices, strict=True)
    ]
    return ShardedPerReplica(distribution.join_shards(shards), scalars, distribution)
