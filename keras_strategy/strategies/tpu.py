"""Strategy for the cores of a TPU, several of which may form one replica."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_strategy.cluster.membership import Cluster
from keras_strategy.cluster_resolver.cluster_spec import training_tasks
from keras_strategy.core.registry import get_engine
from keras_strategy.devices import LogicalDevices, repeat_devices
from keras_strategy.errors import UnsupportedBackendError
from keras_strategy.options import CommunicationOptions
from keras_strategy.strategies.base import Strategy
from keras_strategy.strategies.extended import StrategyExtended
from keras_strategy.strategies.mirrored import check_workers_agree, connect_workers
from keras_strategy.topology import DeviceAssignment, Topology
from keras_strategy.training.sharding import VariableLayouts

logger = logging.getLogger("keras_strategy")

# For each host, and each of its replicas, the names of the replica's devices.
Devices = tuple[tuple[tuple[str, ...], ...], ...]


@dataclass(frozen=True)
class TPUSystem:
    """A TPU whose hosts, the tasks of its topology, have the same number of cores."""

    topology: Topology
    # Of each host's cores, in topology order.
    device_names: tuple[str, ...]


def find_tpu_system(resolver: Any) -> tuple[TPUSystem, Cluster | None]:
    """Return a resolver's TPU, or this machine's; its hosts, if several, connect."""
    if resolver is not None and not hasattr(resolver, "cluster_spec"):
        raise TypeError(
            "A TPU needs a `keras_strategy.cluster_resolver.TPUClusterResolver`, the "
            "result of `keras_strategy.testing.simulated_tpu`, or None. "
            f"Received: {resolver!r} of type {type(resolver).__name__}"
        )
    workers = None
    if resolver is not None and host_count(resolver) > 1:
        workers = connect_workers(resolver, CommunicationOptions())
    simulated = getattr(resolver, "tpu_system", None)
    if isinstance(simulated, TPUSystem):
        return simulated, workers
    places = get_engine().tpu_coordinates()
    of_hosts: list[Any] = [places]
    if workers is not None:
        of_hosts = workers.exchange("the TPU", places)
    if not all(of_hosts):
        raise ValueError(
            "There is no TPU on this machine, for the Keras backend "
            f"'{get_engine().name}'. Run this on a TPU VM, or pass "
            "`keras_strategy.testing.simulated_tpu((2, 2, 1, 2))`. Received: "
            f"{resolver!r}"
        )
    numbers = list(map(len, of_hosts))
    if len(set(numbers)) > 1:
        raise ValueError(
            "All hosts of a TPU must have the same number of cores. Received: "
            f"{workers.format_by_worker(numbers) if workers else numbers}."
        )
    coordinates = np.array(of_hosts, np.int32)
    coordinates -= coordinates.min(axis=(0, 1))
    topology = Topology(
        mesh_shape=coordinates.max(axis=(0, 1)) + 1, device_coordinates=coordinates
    )
    return TPUSystem(topology, tuple(f"tpu:{i}" for i in range(numbers[0]))), workers


def host_count(resolver: Any) -> int:
    """Return the number of hosts that a resolver names."""
    spec = resolver.cluster_spec()
    if not spec:
        return 1
    return len(training_tasks(spec) or spec.job_tasks(resolver.task_type))


def initialize_tpu_system(cluster_resolver: Any = None) -> Topology:
    """Return the topology of a TPU.

    The backend initializes the TPU on first use; this only reads its topology. All
    hosts of a TPU must call it, since they connect.

    Args:
        cluster_resolver: A `cluster_resolver.TPUClusterResolver`, or the result of
            `testing.simulated_tpu`; None for this machine's TPU.

    Returns:
        A `Topology`.

    Raises:
        TypeError: If it is not a resolver.
        ValueError: If there is no TPU.

    Example:

    ```python
    import keras_strategy as ks
    from keras_strategy.testing import simulated_tpu

    tpu = simulated_tpu((2, 1, 1, 2))
    topology = ks.tpu.experimental.initialize_tpu_system(tpu)
    assert topology.num_tpus_per_task == 4
    ```
    """
    return find_tpu_system(cluster_resolver)[0].topology


def shutdown_tpu_system(cluster_resolver: Any = None) -> None:
    """Check that the TPU exists, and leave it unchanged.

    A backend releases its TPU when the process ends.

    Args:
        cluster_resolver: See `initialize_tpu_system`.

    Raises:
        TypeError: If it is not a resolver.
        ValueError: If there is no TPU.

    Example:

    ```python
    import keras_strategy as ks
    from keras_strategy.testing import simulated_tpu

    ks.tpu.experimental.shutdown_tpu_system(simulated_tpu((2, 1, 1, 1)))
    ```
    """
    find_tpu_system(cluster_resolver)


class TPUStrategy(Strategy):
    """Synchronous training on the cores of a TPU, on JAX.

    A replica has one core, or several: its logical devices. They share the weights that
    `layout_map` splits and the tensors that `experimental_split_to_logical_devices`
    splits, and the computation with them. Trained weights are those of one device.

    A TPU with several hosts needs a process on each, which all run the same program, as
    with `MultiWorkerMirroredStrategy`: create the strategy before any other use of
    devices. A replica's cores belong to one host.

    To simulate a TPU, see `keras_strategy.testing.simulated_tpu`.

    Args:
        tpu_cluster_resolver: A `cluster_resolver.TPUClusterResolver`, or the result of
            `testing.simulated_tpu`; None for this machine's TPU.
        experimental_device_assignment: A `tpu.experimental.DeviceAssignment` of the
            cores of each replica.
        experimental_spmd_xla_partitioning: True to only allow splitting tensors, not
            assigning them to one logical device, see
            `experimental_assign_to_logical_device`.
        devices_per_replica: The number of logical devices of each replica, instead of
            an assignment: each replica gets that many neighbouring cores. None is 1.
        layout_map: How weights are split over the logical devices of a replica: a dict
            from regular expressions, of which at most one may match a variable's path,
            to the number of parts of each dimension, such as
            `{"dense.*kernel": (1, 2)}`; or a `keras.distribution.LayoutMap`, of which
            the axis sizes count. None keeps all weights on each logical device.
        batch_statistics: See `MirroredStrategy`.
        shard: What is sharded over the replicas, see `MirroredStrategy`. Of a weight
            that `layout_map` splits over logical devices, each replica has shards of
            the parts.
        virtual_replicas: See `MirroredStrategy`. Replicas must have one core.

    Raises:
        UnsupportedBackendError: If the Keras backend is not JAX.
        TypeError: If an argument has another type.
        ValueError: If there is no TPU, the replicas do not fit on it, a layout does not
            fit the replicas, or `shard` or `virtual_replicas` is invalid.
        RuntimeError: If settings that must be equal differ between hosts.

    Example:

    ```python
    import keras
    import numpy as np
    import keras_strategy as ks
    from keras_strategy.testing import simulated_tpu

    if keras.backend.backend() == "jax":
        strategy = ks.TPUStrategy(
            simulated_tpu((2, 1, 1, 2)),
            devices_per_replica=2,
            layout_map={"wide/kernel": (1, 2)},
        )
        with strategy.scope():
            wide = keras.layers.Dense(8, name="wide")
            model = keras.Sequential([keras.Input((3,)), wide, keras.layers.Dense(1)])
            model.compile("adam", "mse")
        model.fit(np.ones((10, 3)), np.ones((10, 1)), batch_size=4, verbose=0)
        assert strategy.num_replicas_in_sync == 2
    ```
    """

    _logical: LogicalDevices

    def __init__(
        self,
        tpu_cluster_resolver: Any = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        experimental_spmd_xla_partitioning: bool = False,
        *,
        devices_per_replica: int | None = None,
        layout_map: Any = None,
        batch_statistics: str | None = None,
        shard: str | None = None,
        virtual_replicas: int | None = None,
    ):
        reason = get_engine().logical_devices_unsupported_reason()
        if reason is not None:
            raise UnsupportedBackendError(
                "`TPUStrategy` is not available with the Keras backend "
                f"'{get_engine().name}': {reason}"
            )
        self._set_options(batch_statistics, shard, virtual_replicas)
        self._tpu_cluster_resolver = tpu_cluster_resolver
        self._experimental_device_assignment = experimental_device_assignment
        self._experimental_spmd_xla_partitioning = experimental_spmd_xla_partitioning
        self._devices_per_replica, self._layout_map = devices_per_replica, layout_map
        self._logged_assignment = False
        system, workers = find_tpu_system(tpu_cluster_resolver)
        devices = _devices(system, experimental_device_assignment, devices_per_replica)
        count = len(devices[0][0])
        if virtual_replicas is not None and count > 1:
            raise ValueError(
                "With `virtual_replicas` a replica has one device. Received: "
                f"virtual_replicas={virtual_replicas} and {count} logical devices for "
                "each replica. Omit one of the two."
            )
        layouts = None if layout_map is None else VariableLayouts(layout_map, count)
        rank = 0 if workers is None else workers.rank
        self._logical = LogicalDevices(devices, rank, layouts)
        first = repeat_devices(
            [replica[0] for replica in self._logical.devices],
            virtual_replicas,
            len(devices),
        )
        if workers is not None:
            parts = None if layouts is None else layouts.parts
            chosen = {
                "devices of replicas": [list(map(list, host)) for host in devices],
                "`layout_map`": parts and {key: list(parts[key]) for key in parts},
            }
            check_workers_agree(self, workers, first, chosen)
        super().__init__(StrategyExtended(self, first, cluster=workers))

    @property
    def cluster_resolver(self) -> Any:
        """The resolver of the TPU, or None."""
        return self._tpu_cluster_resolver

    def experimental_split_to_logical_devices(
        self, tensor: Any, partition_dimensions: Sequence[int]
    ) -> Any:
        """Split a replica's tensor over its logical devices.

        XLA splits the computation that uses it accordingly, as far as it can. No value
        changes. Call it in a layer's `call`, or in a function that `run` calls; a
        tensor outside a compiled program stays where it is.

        Args:
            tensor: A tensor. In `fit` its first dimension is the batch dimension.
            partition_dimensions: The number of parts of each dimension. Their product
                is the number of logical devices.

        Returns:
            The tensor.

        Raises:
            ValueError: If the tensor cannot be split like that, or is the symbolic
                input of a functional model.

        Example:

        ```python
        import keras
        import keras_strategy as ks
        from keras_strategy.testing import simulated_tpu

        if keras.backend.backend() == "jax":
            tpu = simulated_tpu((2, 1, 1, 2))
            strategy = ks.TPUStrategy(tpu, devices_per_replica=2)

            def step():
                images = keras.ops.ones((4, 8, 8, 3))
                return strategy.experimental_split_to_logical_devices(
                    images, [1, 2, 1, 1]
                )

            strategy.run(step)
        ```
        """
        parts = list(partition_dimensions)
        shape = _shape(tensor, "experimental_split_to_logical_devices")
        count = self._logical.per_replica
        if len(shape) != len(parts):
            raise ValueError(
                "Length of `partition_dimensions` must equal to the rank of "
                f"`tensor.shape` ({len(shape)}). Received "
                f"len(partition_dimensions)={len(parts)}."
            )
        positive = all(isinstance(n, int) and n > 0 for n in parts)
        if not positive or math.prod(parts) != count:
            raise ValueError(
                "The product of `partition_dimensions` should be the same as the "
                f"number of logical devices (={count}). Received "
                f"`partition_dimensions`={parts}, and their product is "
                f"{math.prod(parts)}."
            )
        return self._split(tensor, parts)

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> Any:
        """Replicate a replica's tensor on each of its logical devices.

        The opposite of `experimental_split_to_logical_devices`, for the same places.

        Args:
            tensor: A tensor. In `fit` its first dimension is the batch dimension.

        Returns:
            The tensor.

        Raises:
            ValueError: If it is the symbolic input of a functional model.
        """
        shape = _shape(tensor, "experimental_replicate_to_logical_devices")
        return self._split(tensor, [1] * len(shape))

    def experimental_assign_to_logical_device(
        self, tensor: Any, logical_device_id: int
    ) -> Any:
        """Check the index of a logical device, and return the tensor.

        XLA decides where an operation is computed: on JAX none can be pinned to one
        logical device. No value depends on it. The log notes it once.

        Args:
            tensor: Any tensor of the replica.
            logical_device_id: Index of a logical device of the replica.

        Returns:
            The tensor.

        Raises:
            ValueError: If the logical device does not exist; or always with
                `experimental_spmd_xla_partitioning=True`.
        """
        if self._experimental_spmd_xla_partitioning:
            raise ValueError(
                "Cannot assign a tensor to a logical device in SPMD mode. Use "
                "`experimental_split_to_logical_devices`, or leave "
                "`experimental_spmd_xla_partitioning` out."
            )
        count = self._logical.per_replica
        if not 0 <= logical_device_id < count:
            raise ValueError(
                "`logical_core_id` to assign must be lower then total number of "
                "logical devices per replica. Received logical device id "
                f"{logical_device_id} but there are only total of {count} logical "
                "devices in replica."
            )
        if not self._logged_assignment:
            self._logged_assignment = True
            logger.info(
                "experimental_assign_to_logical_device has no effect on JAX, where XLA "
                "decides which logical device computes what; the result is the same."
            )
        return tensor

    def _split(self, tensor: Any, parts: Sequence[int]) -> Any:
        group: Any = self.extended.group  # one of replicas with several devices
        return group.distribution.constrain(tensor, parts)

    def __repr__(self) -> str:
        devices = list(map(list, self._logical.devices))
        return f"{type(self).__name__}(devices={devices})"


def _shape(tensor: Any, method: str) -> tuple[int, ...]:
    if isinstance(tensor, keras.KerasTensor):
        raise ValueError(
            f"`{method}` received a symbolic tensor of a functional model, where it "
            "has no effect. Call it in the `call` of a layer, such as a "
            "`keras.layers.Lambda`."
        )
    return tuple(keras.ops.shape(tensor))


def _devices(system: TPUSystem, assignment: Any, per_replica: Any) -> Devices:
    """Return the names of each replica's devices."""
    if assignment is not None:
        return _assigned_devices(system, assignment, per_replica)
    count = 1 if per_replica is None else per_replica
    names, hosts = system.device_names, system.topology.num_tasks
    if (
        isinstance(count, bool)
        or not isinstance(count, int)
        or count < 1
        or len(names) % count
    ):
        raise ValueError(
            "Argument `devices_per_replica` must be an integer that divides the "
            f"number of {'each host' if hosts > 1 else 'the TPU'}'s cores, "
            f"which is {len(names)}. Received: devices_per_replica={per_replica!r}"
        )
    replicas = tuple(names[i : i + count] for i in range(0, len(names), count))
    return (replicas,) * hosts


def _assigned_devices(system: TPUSystem, assignment: Any, per_replica: Any) -> Devices:
    if not isinstance(assignment, DeviceAssignment):
        raise TypeError(
            "Argument `experimental_device_assignment` must be a "
            "`keras_strategy.tpu.experimental.DeviceAssignment`, or None. Received: "
            f"{assignment!r} of type {type(assignment).__name__}"
        )
    if per_replica is not None:
        raise ValueError(
            "Both `experimental_device_assignment` and `devices_per_replica` set the "
            "number of logical devices of a replica: pass one of them. Received: "
            f"devices_per_replica={per_replica!r}"
        )
    if assignment.topology.serialized() != system.topology.serialized():
        raise ValueError(
            "Argument `experimental_device_assignment` must be of the topology of this "
            "TPU, as `initialize_tpu_system(tpu_cluster_resolver)` returns it. "
            f"Received one for a mesh {assignment.topology.mesh_shape}; this TPU's is "
            f"{system.topology.mesh_shape}."
        )
    cores = assignment.core_assignment
    if not cores.size or len(set(map(tuple, cores.reshape(-1, 4)))) < cores.size // 4:
        raise ValueError(
            "Argument `experimental_device_assignment` must give each replica its own "
            f"cores. Received: core_assignment={cores.tolist()}"
        )

    def locate(coordinates):
        """Return the host of a core, and its name there."""
        ordinal = system.topology.tpu_device_ordinal_at_coordinates(coordinates)
        if ordinal < 0:
            raise ValueError(
                f"The TPU has no core at {[int(x) for x in coordinates]}, which an "
                "assignment uses."
            )
        host = system.topology.task_ordinal_at_coordinates(coordinates)
        return int(host), system.device_names[ordinal]

    places = [list(map(locate, replica)) for replica in cores]
    hosts = [sorted({host for host, _ in replica}) for replica in places]
    each, rest = divmod(len(places), system.topology.num_tasks)
    if rest or hosts != [[replica // each] for replica in range(len(places))]:
        raise ValueError(
            "Argument `experimental_device_assignment` must give each replica "
            "cores of one host and each host the same number of replicas, in host "
            f"order. Received, by replica, the hosts {hosts}."
        )
    names = [tuple(name for _, name in replica) for replica in places]
    return tuple(tuple(names[i : i + each]) for i in range(0, len(names), each))
