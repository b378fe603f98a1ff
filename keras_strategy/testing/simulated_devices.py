"""Simulated TPU of logical CPU devices."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_strategy import config
from keras_strategy.cluster_resolver import ClusterSpec, SimpleClusterResolver
from keras_strategy.core.registry import get_engine
from keras_strategy.strategies.tpu import TPUSystem, host_count
from keras_strategy.topology import Topology


class SimulatedTPU(SimpleClusterResolver):
    """Resolver of a simulated TPU. Made by `simulated_tpu`."""

    def __init__(self, mesh_shape: tuple[int, ...], hosts: Any = None):
        spec, task_type, task_id = ClusterSpec({}), None, None
        if hosts is not None:
            # First: some resolvers set their task from the spec.
            spec = hosts.cluster_spec()
            task_type, task_id = hosts.task_type, hosts.task_id
        super().__init__(spec, task_type=task_type, task_id=task_id)
        self._mesh_shape, self._hosts = mesh_shape, hosts
        coordinates = np.array(list(np.ndindex(*mesh_shape)), np.int32)
        coordinates = coordinates.reshape(host_count(self), -1, 4)
        topology = Topology(mesh_shape=mesh_shape, device_coordinates=coordinates)
        names = tuple(f"cpu:{i}" for i in range(topology.num_tpus_per_task))
        self.tpu_system = TPUSystem(topology, names)

    def __repr__(self) -> str:
        hosts = "" if self._hosts is None else f", {self._hosts!r}"
        return f"simulated_tpu({self._mesh_shape}{hosts})"

    def __reduce__(self):
        return simulated_tpu, (self._mesh_shape, self._hosts)


def simulated_tpu(mesh_shape: Sequence[int], hosts: Any = None) -> SimulatedTPU:
    """Use logical CPU devices as the cores of a TPU.

    Pass the result in place of a `TPUClusterResolver`. Call this function at the
    start of the program: it calls `config.set_logical_devices`, unless the CPU
    already has enough logical devices.

    Several processes can simulate the hosts of one TPU. Each then has an equal
    number of its cores.

    Args:
        mesh_shape: The shape of the TPU in cores: x, y, z, and in each chip.
        hosts: The `ClusterResolver` of its hosts, such as
            `cluster_resolver.TFConfigClusterResolver()`. None is this process alone.

    Returns:
        A resolver, for `TPUStrategy` and `tpu.experimental.initialize_tpu_system`.

    Raises:
        TypeError: If `hosts` is not a resolver.
        ValueError: If `mesh_shape` is not four positive numbers, or the hosts cannot
            have equal numbers of cores.
        RuntimeError: If the CPU is already in use with fewer devices.

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
            "Argument `mesh_shape` must be four positive numbers of cores, such as "
            f"(2, 2, 1, 2). Received: mesh_shape={mesh_shape!r}"
        )
    if hosts is not None and not hasattr(hosts, "cluster_spec"):
        raise TypeError(
            "Argument `hosts` must be a ClusterResolver, or None. Received: "
            f"hosts={hosts!r} of type {type(hosts).__name__}"
        )
    num_hosts = 1 if hosts is None else host_count(hosts)
    if math.prod(shape) % num_hosts:
        raise ValueError(
            f"The {num_hosts} hosts of `hosts` must have equal numbers of cores. "
            f"Received: mesh_shape={mesh_shape!r}, which is {math.prod(shape)} cores"
        )
    count = math.prod(shape) // num_hosts
    if config.logical_cpus() < count:
        try:
            config.set_logical_devices("cpu", count)
        except RuntimeError:
            if len(get_engine().list_devices("cpu")) < count:
                raise
    return SimulatedTPU(shape, hosts)
