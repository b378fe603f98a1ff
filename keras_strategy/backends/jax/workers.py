"""Values that travel between the processes of a cluster, outside of programs.

Inside a program XLA's collectives take care of the other processes. These are for what
each process holds by itself. Before values travel the workers compare what they are
about to send: JAX would hang or end the process where it differs.
"""

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from keras import tree

from keras_strategy.backends.jax.distribution import ReplicaDistribution
from keras_strategy.workers.cluster import Cluster


class JaxWorkers:
    """The processes of a cluster, one call at a time.

    Args:
        cluster: The workers.
        distribution: The layouts of all their replicas.
    """

    def __init__(self, cluster: Cluster, distribution: ReplicaDistribution):
        self.cluster = cluster
        self._distribution = distribution

    def told(self, name: str, mine: Any) -> list[Any] | None:
        """What every worker says, if they say different things.

        Args:
            name: What it is about.
            mine: What this worker says, of JSON's values; it may be long.

        Returns:
            None if all say the same.
        """
        text = json.dumps(mine)
        if len(set(self._agree(name, _digest(text.encode())))) == 1:
            return None
        return self.cluster.agree(f"{name}: what differs", mine)

    def require_same_shapes(self, name: str, data: Any) -> None:
        """Compares the arrays that all workers are given.

        Args:
            name: What they were given to.
            data: A structure of arrays.

        Raises:
            ValueError: If their shapes differ between workers.
        """
        shapes = [list(np.shape(leaf)) for leaf in tree.flatten(data)]
        told = self.told(name, shapes)
        if told is not None:
            raise ValueError(
                f"`{name}` takes the same batch on all workers, of which each computes "
                f"its own rows. Received arrays of the shapes "
                f"{self._listed([[tuple(s) for s in shapes] for shapes in told])}."
            )

    def sum_all(self, name: str, tensors: Sequence[Any]) -> list[jax.Array]:
        """The sums of the workers' tensors.

        Args:
            name: What they are for.
            tensors: Tensors that are on this process's devices alone.

        Returns:
            The sums, likewise.

        Raises:
            ValueError: If shapes or dtypes differ between workers.
        """
        tensors = [jnp.asarray(tensor) for tensor in tensors]
        layouts = [[list(t.shape), str(t.dtype)] for t in tensors]
        told = self.told(name, layouts)
        if told is not None:
            raise ValueError(
                f"`{name}` needs values whose shapes and dtypes are the same on every "
                f"worker. Received: {self._listed(map(_described, told))}."
            )
        with self.cluster.member.waiting(name):
            stacked = [self._one_for_each_device(tensor) for tensor in tensors]
            totals = _sums(self._distribution.everywhere)(stacked)
            jax.block_until_ready(totals)
        return [self._local(total) for total in totals]

    def gather(self, name: str, tensor: Any, axis: int) -> tuple[jax.Array, list[int]]:
        """The workers' tensors, joined in the order of their ranks.

        Args:
            name: What it is for.
            tensor: A tensor that is on this process's devices alone.
            axis: Along which they are joined. The sizes there may differ.

        Returns:
            The joined tensor, likewise, and each worker's size along `axis`.

        Raises:
            ValueError: If other sizes, or the dtypes, differ between workers.
        """
        tensor = jnp.asarray(tensor)
        mine = [list(tensor.shape), str(tensor.dtype)]
        told = self._agree(name, mine)
        # One that has no such axis differs from the others by its number of axes.
        axis %= max(tensor.ndim, 1)
        others = {(*s[:axis], "", *s[axis + 1 :], dtype) for s, dtype in told}
        if len(others) > 1 or tensor.ndim == 0:
            raise ValueError(
                f"`{name}` needs values whose dtypes, and sizes other than that of "
                f"axis {axis}, are the same on every worker. Received: "
                f"{self._listed(_described([layout]) for layout in told)}."
            )
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
        with self.cluster.member.waiting(name):
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

    def chiefs(self, name: str, arrays: Sequence[np.ndarray]) -> Any:
        """The chief's arrays, where the workers' differ.

        Args:
            name: What they are.
            arrays: This worker's.

        Returns:
            None if they are the same on all workers, as they should.

        Raises:
            ValueError: If their shapes or dtypes differ.
        """
        mine = [_digest(np.ascontiguousarray(array).tobytes()) for array in arrays]
        layouts = [[list(array.shape), str(array.dtype)] for array in arrays]
        text = json.dumps([mine, layouts])
        digests = self._agree(name, _digest(text.encode()))
        if len(set(digests)) == 1:
            return None
        told = self.told(name, layouts)
        if told is not None:
            raise ValueError(
                f"All workers must make the same variables. Received, for {name}: "
                f"{self._listed(map(_described, told))}."
            )
        with self.cluster.member.waiting(name):
            return multihost_utils.broadcast_one_to_all(list(arrays))

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

    def _agree(self, name: str, value: Any) -> list[Any]:
        # Names of variables count what a process has made before, and may differ.
        return self.cluster.agree(name.partition(" '")[0], value)

    def _listed(self, told: Iterable[Any]) -> str:
        pairs = zip(self.cluster.names, told, strict=True)
        return ", ".join(f"{name}: {what}" for name, what in pairs)


@functools.cache
def _sums(everywhere: Any) -> Any:
    def sums(stacked):
        return [jnp.sum(x, axis=0, dtype=x.dtype) for x in stacked]

    return jax.jit(sums, out_shardings=everywhere)


@functools.cache
def _copies(everywhere: Any) -> Any:
    return jax.jit(lambda x: x, out_shardings=everywhere)


def _described(layouts: Iterable[Any]) -> str:
    return " and ".join(f"{tuple(shape)} {dtype}" for shape, dtype in layouts)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
