"""The layouts by which Keras's own global program works for a group."""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import keras
from jax.core import Tracer
from jax.experimental.sparse import JAXSparse

from keras_strategy.backends.jax.devices import device_named

logger = logging.getLogger("keras_strategy")
# The name of the mesh's only axis.
AXIS = "replica"


class ReplicaDistribution(keras.distribution.DataParallel):
    """Batches split by rows where they can be, variables on every device.

    A batch that the devices do not divide is computed whole on each of them: the
    result is the same, and no padding gets into a mean.

    Args:
        devices: Canonical names of the devices.
    """

    def __init__(self, devices: tuple[str, ...]):
        # Named as JAX names them, which is what Keras looks for.
        found = [device_named(name) for name in devices]
        mesh = keras.distribution.DeviceMesh(
            (len(found),), [AXIS], [f"{d.platform}:{d.id}" for d in found]
        )
        super().__init__(device_mesh=mesh, auto_shard_dataset=False)
        self.devices = found
        self._warned = False
        self.mesh: jax.sharding.Mesh = mesh.backend_mesh
        self.everywhere = jax.sharding.NamedSharding(
            self.mesh, jax.sharding.PartitionSpec()
        )
        self.split = jax.sharding.NamedSharding(
            self.mesh, jax.sharding.PartitionSpec(AXIS)
        )

    def get_data_layout(self, data_shape: Any) -> Any:
        if len(data_shape) == 0 or data_shape[0] % len(self.devices):
            return keras.distribution.TensorLayout(
                [None] * len(data_shape), self.device_mesh
            )
        return super().get_data_layout(data_shape)

    def replicated_layout(self, rank: int) -> Any:
        """The layout of a variable of `rank` dimensions."""
        return keras.distribution.TensorLayout([None] * rank, self.device_mesh)

    def place_rows(self, array: Any, steps_in_front: bool = False) -> Any:
        """Puts a batch's array on the devices, split by rows where it can be.

        A sparse matrix is computed whole on each of them: what it stores is in no
        order of rows.

        Args:
            array: The array.
            steps_in_front: Whether the rows are the second axis, after the steps that
                Keras computes in one go.
        """
        if isinstance(array, JAXSparse):
            return jax.device_put(array, self.everywhere)
        if not hasattr(array, "shape"):
            array = keras.ops.convert_to_tensor(array)
        shape = tuple(array.shape)
        layout = self.get_data_layout(shape[1:] if steps_in_front else shape)
        if steps_in_front:
            layout = keras.distribution.TensorLayout(
                [None, *layout.axes], self.device_mesh
            )
        return jax.device_put(array, layout.backend_layout)

    def noticing(
        self, batches: Iterable[Any], steps_in_front: bool = False
    ) -> Iterator[Any]:
        """The batches as they are; a warning where the devices do not divide them.

        A last batch that they do not divide is nothing to speak of.

        Args:
            batches: The batches.
            steps_in_front: See `place_rows`.
        """
        previous = 0
        rows = 1 if steps_in_front else 0
        for data in batches:
            if previous % len(self.devices) and not self._warned:
                self._warned = True
                logger.warning(
                    "Batches of %d rows cannot be split evenly over %d devices, so "
                    "every device computes all of their rows: the result is right, "
                    "and no faster than on one device. Choose a batch size that is a "
                    "multiple of %d.",
                    previous,
                    len(self.devices),
                    len(self.devices),
                )
            yield data
            leaves = [x for x in keras.tree.flatten(data) if hasattr(x, "shape")]
            shape = leaves[0].shape if leaves else ()
            previous = shape[rows] if len(shape) > rows else 0

    def place(self, value: Any) -> Any:
        """Puts an array that is bound to other devices on all of ours."""
        if (
            isinstance(value, jax.Array)
            and not isinstance(value, Tracer)
            and value.committed
            and value.sharding.device_set != self.everywhere.device_set
        ):
            return jax.device_put(value, self.everywhere)
        return value
