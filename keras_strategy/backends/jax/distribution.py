"""The layouts by which Keras's own global program works for a group."""

import functools
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.core import Tracer
from jax.experimental.sparse import JAXSparse

from keras_strategy.backends.jax.devices import device_named, devices_of_all_workers
from keras_strategy.values.topology import Topology
from keras_strategy.workers.cluster import Cluster

logger = logging.getLogger("keras_strategy")
# The name of the mesh's only axis.
AXIS = "replica"


class ReplicaDistribution(keras.distribution.DataParallel):
    """Batches split by rows where they can be, variables on every device.

    A batch that the devices do not divide is computed whole on each of them: the
    result is the same, and no padding gets into a mean.

    Args:
        devices: Canonical names of this worker's devices.
        cluster: The workers, each with as many devices; None for this one alone.

    Attributes:
        topology: Where the replicas are.
        devices: This worker's devices.
        replicas: The number of devices, over all workers.
        mesh: The devices of all workers.
        everywhere: The layout of what every device has whole.
        split: That of what is split by rows.
    """

    def __init__(self, devices: tuple[str, ...], cluster: Cluster | None = None):
        self.cluster = cluster
        self.topology = Topology(devices, cluster)
        self.devices = [device_named(name) for name in devices]
        found = self.devices if cluster is None else devices_of_all_workers(devices)
        self.replicas = len(found)
        # Named as JAX names them, which is what Keras looks for.
        mesh = keras.distribution.DeviceMesh(
            (len(found),), [AXIS], [f"{d.platform}:{d.id}" for d in found]
        )
        super().__init__(device_mesh=mesh, auto_shard_dataset=False)
        # Collectives of two programs at once may starve each other of CPU threads.
        self.one_at_a_time = cluster is not None and self.devices[0].platform == "cpu"
        self._warned = False
        self.mesh: jax.sharding.Mesh = mesh.backend_mesh
        self.everywhere = jax.sharding.NamedSharding(
            self.mesh, jax.sharding.PartitionSpec()
        )
        self.split = jax.sharding.NamedSharding(
            self.mesh, jax.sharding.PartitionSpec(AXIS)
        )
        self._split_after_steps = jax.sharding.NamedSharding(
            self.mesh, jax.sharding.PartitionSpec(None, AXIS)
        )

    def get_data_layout(self, data_shape: Any) -> Any:
        if len(data_shape) == 0 or data_shape[0] % self.replicas:
            return keras.distribution.TensorLayout(
                [None] * len(data_shape), self.device_mesh
            )
        return super().get_data_layout(data_shape)

    def replicated_layout(self, rank: int) -> Any:
        """The layout of a variable of `rank` dimensions."""
        return keras.distribution.TensorLayout([None] * rank, self.device_mesh)

    def place_batch(self, batch: Any, steps_in_front: bool = False) -> Any:
        """Puts a batch's arrays on the devices, split by rows where they can be.

        A sparse matrix is computed whole on each of them: what it stores is in no
        order of rows.

        Args:
            batch: A structure of arrays and None.
            steps_in_front: Whether the rows are the second axis, after the steps that
                Keras computes in one go.
        """
        leaves = keras.tree.flatten(batch)
        split = self._split_after_steps if steps_in_front else self.split
        axis, replicas = int(steps_in_front), self.replicas
        for i, leaf in enumerate(leaves):
            if leaf is None:
                continue
            if isinstance(leaf, JAXSparse):
                leaves[i] = jax.tree.map(lambda x: put(x, self.everywhere), leaf)
                continue
            if not hasattr(leaf, "shape"):
                leaf = keras.ops.convert_to_tensor(leaf)
            shape = leaf.shape
            even = len(shape) > axis and shape[axis] % replicas == 0
            layout = split if even else self.everywhere
            if type(leaf) is np.ndarray:
                # What `jax.device_put` does, in half of its time.
                leaves[i] = jax.make_array_from_callback(
                    shape, layout, leaf.__getitem__
                )
            else:
                leaves[i] = put(leaf, layout)
        return keras.tree.pack_sequence_as(batch, leaves)

    def joined(self, parts: Sequence[jax.Array]) -> jax.Array:
        """One array, split by rows, of which each of our devices has its part."""
        rows, *others = parts[0].shape
        return jax.make_array_from_single_device_arrays(
            (self.replicas * rows, *others), self.split, list(parts)
        )

    def noticing(
        self, batches: Iterable[Any], steps_in_front: bool = False
    ) -> Iterator[Any]:
        """The batches as they are; a warning where the devices do not divide them.

        A last batch that they do not divide is nothing to speak of.

        Args:
            batches: The batches.
            steps_in_front: See `place_batch`.
        """
        previous = 0
        rows = 1 if steps_in_front else 0
        for data in batches:
            if previous % self.replicas and not self._warned:
                self._warned = True
                logger.warning(
                    "Batches of %d rows cannot be split evenly over %d devices, so "
                    "every device computes all of their rows: the result is right, "
                    "and no faster than on one device. Choose a batch size that is a "
                    "multiple of %d.",
                    previous,
                    self.replicas,
                    self.replicas,
                )
            yield data
            first = data
            while isinstance(first, tuple | list) and first:
                first = first[0]
            if not hasattr(first, "shape"):  # None, or a structure of another kind
                arrays = (x for x in keras.tree.flatten(data) if hasattr(x, "shape"))
                first = next(arrays, None)
            shape = getattr(first, "shape", ())
            previous = shape[rows] if len(shape) > rows else 0

    def place(self, value: Any) -> Any:
        """Puts an array that is bound to other devices on all of ours."""
        if (
            isinstance(value, jax.Array)
            and not isinstance(value, Tracer)
            and value.committed
            and value.sharding.device_set != self.everywhere.device_set
        ):
            return put(value, self.everywhere)
        return value


def put(value: Any, sharding: Any) -> Any:
    """`jax.device_put` of a value that every worker has whole.

    JAX would compare it between the workers first, which takes a collective for each
    value. And it has none for what is on the devices of all workers already.
    """
    if isinstance(value, Tracer) or sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    if isinstance(value, jax.Array):
        if value.sharding.is_equivalent_to(sharding, value.ndim):
            return value
        if not value.is_fully_addressable:
            return _moved(sharding)(value)
    else:
        value = np.asarray(value)
        value = value.astype(jax.dtypes.canonicalize_dtype(value.dtype), copy=False)
    parts = [
        # A program may overwrite it, under the hands of who has the value.
        jax.device_put(_part(value, index), device, may_alias=False)
        for device, index in sharding.addressable_devices_indices_map(
            value.shape
        ).items()
    ]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, parts)


def _part(value: Any, index: tuple[slice, ...]) -> Any:
    return value if all(s == slice(None) for s in index) else value[index]


@functools.cache
def _moved(sharding: Any) -> Any:
    return jax.jit(lambda x: x, out_shardings=sharding)
