"""A TPU for machines that have none: logical CPU devices in its place."""

import math
from collections.abc import Sequence

import numpy as np

from keras_strategy import config
from keras_strategy.cluster_resolver import ClusterSpec, SimpleClusterResolver
from keras_strategy.core.registry import get_engine
from keras_strategy.strategies.tpu_system import TPUSystem
from keras_strategy.values.tpu_topology import Topology


class SimulatedTPU(SimpleClusterResolver):
    """The resolver of a simulated TPU, which `simulated_tpu` makes.

    Args:
        mesh_shape: Four numbers of cores.
    """

    def __init__(self, mesh_shape: tuple[int, ...]):
        super().__init__(ClusterSpec({}))
        self._mesh_shape = mesh_shape
        coordinates = np.array(list(np.ndindex(*mesh_shape)), np.int32)
        topology = Topology(mesh_shape=mesh_shape, device_coordinates=coordinates[None])
        names = tuple(f"cpu:{i}" for i in range(len(coordinates)))
        self.tpu_system = TPUSystem(topology, names)

    def __repr__(self) -> str:
        return f"simulated_tpu({self._mesh_shape})"

    def __reduce__(self):
        return simulated_tpu, (self._mesh_shape,)


def simulated_tpu(mesh_shape: Sequence[int]) -> SimulatedTPU:
    """Makes logical CPU devices stand for the cores of a TPU.

    What it returns is taken where a `TPUClusterResolver` is. Call it at the start of
    the program, as `config.set_logical_devices`, which it calls; where the CPU is
    divided into as many devices or more, those are taken.

    Args:
        mesh_shape: The shape of the TPU in cores: x, y, z, and in each chip.

    Returns:
        A resolver, for `TPUStrategy` and `tpu.experimental.initialize_tpu_system`.

    Raises:
        ValueError: If `mesh_shape` is not four positive numbers.
        RuntimeError: If the CPU is in use already, as fewer devices.

    Example:

    ```python
    import keras_strategy as ks
    from keras_strategy.testing import simulated_tpu

    tpu = simulated_tpu((2, 1, 1, 2))
    topology = ks.tpu.experimental.initialize_tpu_system(tpu)
    assignment = ks.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=[1, 1, 1, 2], num_replicas=2
    )
    assert assignment.num_cores_per_replica == 2
    ```
    """
    shape = tuple(mesh_shape)
    if len(shape) != 4 or not all(
        isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in shape
    ):
        raise ValueError(
            "Argument `mesh_shape` must be four whole numbers of cores, 1 or more, "
            f"such as (2, 2, 1, 2). Received: mesh_shape={mesh_shape!r}"
        )
    count = math.prod(shape)
    if config.logical_cpus() < count:
        try:
            config.set_logical_devices("cpu", count)
        except RuntimeError:
            if len(get_engine().list_devices("cpu")) < count:
                raise
    return SimulatedTPU(shape)
