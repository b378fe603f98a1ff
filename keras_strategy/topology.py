"""TPU topology and the assignment of its cores to replicas."""

import enum
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_strategy.topology_proto import (
    COORDINATES,
    MESH_SHAPE,
    NUMBER,
    PER_TASK,
    TASKS,
    decode_fields,
    decode_varints,
    encode_packed,
    encode_varint,
)


class Topology:
    """Mesh shape and device coordinates of a set of TPU devices.

    `keras_strategy.tpu.experimental.initialize_tpu_system` returns the topology of
    the TPU.

    Args:
        serialized: The result of `serialized()`, from this library or TensorFlow.
            If None, the other two arguments are required.
        mesh_shape: Four positive numbers of cores: along x, y and z, and per chip.
        device_coordinates: The mesh coordinates of each task's devices, an integer
            array of shape `[tasks, devices, 4]`.

    Raises:
        ValueError: If the arguments do not describe a topology.

    Example:

    ```python
    import numpy as np
    import keras_strategy as ks

    topology = ks.tpu.experimental.Topology(
        mesh_shape=[2, 1, 1, 2],
        device_coordinates=[[[0, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0], [1, 0, 0, 1]]],
    )
    assert topology.num_tasks == 1 and topology.num_tpus_per_task == 4
    assert topology.tpu_device_ordinal_at_coordinates([1, 0, 0, 0]) == 2
    ```
    """

    def __init__(
        self,
        serialized: bytes | None = None,
        mesh_shape: Any = None,
        device_coordinates: Any = None,
    ):
        self._serialized = serialized
        if serialized:
            self._mesh_shape, self._device_coordinates = _parse(serialized)
        else:
            self._mesh_shape = np.asarray(mesh_shape, np.int32)
            self._device_coordinates = np.asarray(device_coordinates, np.int32)
            _check_mesh_shape(self._mesh_shape)
            shape = self._device_coordinates.shape
            if len(shape) != 3 or shape[2] != 4:
                raise ValueError(
                    "`device_coordinates` must be a rank 3 int32 array with minor "
                    "dimension equal to the `mesh_shape` rank, as [tasks, devices, 4]. "
                    f"Received: device_coordinates of shape {shape}"
                )
        # Indexed by mesh coordinates: task and device ordinal, -1 without a device.
        self._tasks = np.full(self._mesh_shape, -1, np.int32)
        self._ordinals = np.full(self._mesh_shape, -1, np.int32)
        for task, devices in enumerate(self._device_coordinates):
            for ordinal, coordinates in enumerate(devices):
                self._tasks[tuple(coordinates)] = task
                self._ordinals[tuple(coordinates)] = ordinal
        self._missing_devices = np.argwhere(self._tasks < 0)

    @property
    def mesh_shape(self) -> np.ndarray:
        """The mesh shape, four integers."""
        return self._mesh_shape

    @property
    def mesh_rank(self) -> int:
        """The number of mesh dimensions."""
        return len(self._mesh_shape)

    @property
    def device_coordinates(self) -> np.ndarray:
        """The mesh coordinates of each task's devices, `[tasks, devices, 4]`."""
        return self._device_coordinates

    @property
    def missing_devices(self) -> np.ndarray:
        """The mesh coordinates without a device, one per row."""
        return self._missing_devices

    @property
    def num_tasks(self) -> int:
        """The number of tasks (TPU hosts)."""
        return self._device_coordinates.shape[0]

    @property
    def num_tpus_per_task(self) -> int:
        """The number of devices of each task."""
        return self._device_coordinates.shape[1]

    def task_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Return the ordinal of the task that owns the device.

        Args:
            device_coordinates: Four mesh coordinates.
        """
        return self._tasks[tuple(device_coordinates)]

    def tpu_device_ordinal_at_coordinates(
        self, device_coordinates: Sequence[int]
    ) -> int:
        """Return the ordinal of the device within its task.

        Args:
            device_coordinates: Four mesh coordinates.
        """
        return self._ordinals[tuple(device_coordinates)]

    def serialized(self) -> bytes:
        """Return the topology as a serialized `TopologyProto`."""
        if self._serialized is None:
            fields = [encode_packed(MESH_SHAPE, self._mesh_shape)]
            counts = (TASKS, self.num_tasks), (PER_TASK, self.num_tpus_per_task)
            for field, number in counts:
                if number:
                    key = encode_varint(field << 3 | NUMBER)
                    fields.append(key + encode_varint(number))
            coordinates = self._device_coordinates.flatten()
            fields.append(encode_packed(COORDINATES, coordinates))
            self._serialized = b"".join(fields)
        return self._serialized


def _check_mesh_shape(shape: np.ndarray) -> None:
    if shape.shape != (4,) or (shape < 1).any():
        raise ValueError(
            "`mesh_shape` must be a sequence of 4 positive entries. Received: "
            f"mesh_shape={shape}"
        )


def _parse(serialized: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return the mesh shape and the device coordinates."""
    lists: dict[int, list[int]] = {MESH_SHAPE: [], COORDINATES: []}
    numbers = {TASKS: 0, PER_TASK: 0}
    for field, value in decode_fields(serialized):
        if field in lists:
            if isinstance(value, bytes):
                lists[field].extend(decode_varints(value))
            else:
                lists[field].append(value)
        elif field in numbers and isinstance(value, int):
            numbers[field] = value
    shape = np.array(lists[MESH_SHAPE], np.int32)
    _check_mesh_shape(shape)
    tasks, per_task = numbers.values()
    for name, number in (("num_tasks", tasks), ("num_tpu_devices_per_task", per_task)):
        if number < 0:
            raise ValueError(f"`{name}` must be >= 0. Received: {name}={number}")
    coordinates = np.array(lists[COORDINATES], np.int32)
    if len(coordinates) != tasks * per_task * len(shape):
        raise ValueError(
            f"`device_coordinates` must have shape num_tasks ({tasks}) * "
            f"num_tpu_devices_per_task ({per_task}) * len(mesh_shape) ({len(shape)}). "
            f"Received: {len(coordinates)} numbers"
        )
    if (coordinates < 0).any():
        raise ValueError(
            "All values in `device_coordinates` must be >= 0. Received: "
            f"device_coordinates={coordinates}"
        )
    return shape, coordinates.reshape(tasks, per_task, len(shape))


class DeviceOrderMode(enum.IntEnum):
    """Order in which `DeviceAssignment.build` takes the cores.

    Example:

    ```python
    import keras_strategy as ks

    order = ks.tpu.experimental.DeviceOrderMode.RING
    assert order == 1
    ```
    """

    # Rings where possible, else meshes.
    AUTO = 0
    # Rings of replicas and of each replica's cores.
    RING = 1
    # Meshes.
    MESH = 2


class DeviceAssignment:
    """Mapping from the logical devices of each replica to the cores of a TPU.

    `DeviceAssignment.build` computes the usual assignments.

    Args:
        topology: The TPU's `Topology`.
        core_assignment: The mesh coordinates of each replica's cores, an integer
            array of shape `[replicas, logical devices, 4]`.

    Raises:
        ValueError: If `topology` is not a `Topology`, or `core_assignment` has a
            different shape.

    Example:

    ```python
    import keras_strategy as ks

    topology = ks.tpu.experimental.Topology(
        mesh_shape=[2, 1, 1, 2],
        device_coordinates=[[[0, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0], [1, 0, 0, 1]]],
    )
    assignment = ks.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=[1, 1, 1, 2], num_replicas=2
    )
    assert assignment.num_replicas == assignment.num_cores_per_replica == 2
    assert assignment.tpu_ordinal(replica=1, logical_core=1) == 3
    ```
    """

    def __init__(self, topology: Topology, core_assignment: Any):
        if not isinstance(topology, Topology):
            raise ValueError(
                "topology must be a Topology object of "
                "`keras_strategy.tpu.experimental`. Received: topology="
                f"{topology!r} of type {type(topology).__name__}"
            )
        assignment = np.asarray(core_assignment, np.int32)
        if assignment.ndim != 3:
            raise ValueError(
                "core_assignment must be a rank 3 numpy array. Received: "
                f"core_assignment of shape {assignment.shape}"
            )
        if assignment.shape[-1] != topology.mesh_rank:
            raise ValueError(
                "core_assignment.shape[-1] must have size equal to topology rank "
                f"({topology.mesh_rank}). Received: core_assignment of shape "
                f"{assignment.shape}"
            )
        self._topology, self._core_assignment = topology, assignment
        self._replicas: dict[tuple[int, int], list[int]] = {}
        for replica, cores in enumerate(assignment):
            for core, coordinates in enumerate(cores):
                task = int(topology.task_ordinal_at_coordinates(coordinates))
                self._replicas.setdefault((task, core), []).append(replica)

    @property
    def topology(self) -> Topology:
        """The TPU's topology."""
        return self._topology

    @property
    def num_cores_per_replica(self) -> int:
        """The number of logical devices of each replica."""
        return self._core_assignment.shape[1]

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return self._core_assignment.shape[0]

    @property
    def core_assignment(self) -> np.ndarray:
        """The core coordinates, `[replicas, logical devices, 4]`."""
        return self._core_assignment

    def coordinates(self, replica: int, logical_core: int) -> tuple[int, ...]:
        """Return the mesh coordinates of a logical device.

        Args:
            replica: The replica id.
            logical_core: The index of its logical device.
        """
        return tuple(self._core_assignment[replica, logical_core, :])

    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """Return the ids of the replicas that have this logical device on a task.

        Args:
            task_id: The task's ordinal.
            logical_core: The index of the logical device.

        Raises:
            ValueError: If there is no such replica.
        """
        replicas = self._replicas.get((task_id, logical_core))
        if replicas is None:
            raise ValueError(
                f"Can not find any replica in task: {task_id} contains logical_core: "
                f"{logical_core}"
            )
        return replicas

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """Return the ordinal, within its task, of a logical device's core.

        Args:
            replica: The replica id.
            logical_core: The index of its logical device.
        """
        coordinates = self.coordinates(replica, logical_core)
        return self._topology.tpu_device_ordinal_at_coordinates(coordinates)

    @classmethod
    def build(
        cls,
        topology: Topology,
        computation_shape: Any = None,
        computation_stride: Any = None,
        num_replicas: int = 1,
        device_order_mode: DeviceOrderMode = DeviceOrderMode.AUTO,
    ) -> "DeviceAssignment":
        """Assign a compact block of cores to each replica.

        Args:
            topology: The TPU's `Topology`, or its `serialized()` bytes.
            computation_shape: The shape of a replica's block, four numbers of cores.
                None means one core.
            computation_stride: The distance of its cores in each dimension. None
                means adjacent cores.
            num_replicas: The number of replicas.
            device_order_mode: The order of the cores, a `DeviceOrderMode`.

        Returns:
            A `DeviceAssignment`.

        Raises:
            ValueError: If an argument has the wrong type or shape, or the replicas do
                not fit.
        """
        if isinstance(topology, bytes):
            topology = Topology(serialized=topology)
        if not isinstance(topology, Topology):
            raise ValueError(
                "`topology` is not a Topology object. Received: topology="
                f"{topology!r} of type {type(topology).__name__}"
            )
        rank = topology.mesh_rank
        shape = _positive_vector("computation_shape", computation_shape, rank)
        stride = _positive_vector("computation_stride", computation_stride, rank)
        mesh, footprint = topology.mesh_shape, shape * stride
        if (footprint > mesh).any():
            raise ValueError(
                f"computation footprint {footprint} does not fit in TPU topology shape "
                f"{mesh}"
            )
        # Along each dimension; other blocks fit between the cores of one with a stride.
        counts = mesh // footprint * stride
        max_replicas = int(np.prod(counts))
        if num_replicas > max_replicas:
            raise ValueError(
                f"requested {num_replicas} replicas but only {max_replicas} replicas "
                f"with shape {shape} and computation_stride {stride} fit in a TPU mesh "
                f"of shape {mesh}"
            )
        if topology.missing_devices.size:
            return cls(topology, _task_order(topology, shape, stride, num_replicas))
        can_be_rings = (
            shape[-1] == mesh[-1]
            and (stride == 1).all()
            and num_replicas == max_replicas
        )
        if device_order_mode == DeviceOrderMode.RING and not can_be_rings:
            raise ValueError(
                "device_order_mode=DeviceOrderMode.RING is not compatible with the "
                "3D tiling of this topology: each replica must use all cores of its "
                "chips without a stride, and the replicas together must use the "
                "whole TPU. Use device_order_mode=DeviceOrderMode.AUTO."
            )
        grid = _replica_grid(counts, num_replicas)
        if can_be_rings and device_order_mode != DeviceOrderMode.MESH:
            return cls(topology, _ring_order(shape, grid))
        return cls(topology, _mesh_order(shape, stride, grid)[:num_replicas])


def _positive_vector(name: str, value: Any, rank: int) -> np.ndarray:
    """Convert an argument to an array of positive integers."""
    if value is None:
        return np.ones(rank, np.int32)
    value = np.asarray(value, np.int32)
    if value.shape != (rank,):
        raise ValueError(
            f"{name} must have shape [{rank}]. Received: {name} of shape {value.shape}"
        )
    if (value < 1).any():
        raise ValueError(f"{name} must be positive. Received: {name}={value}")
    return value


def _replica_grid(counts: np.ndarray, replicas: int) -> list[int]:
    """Return the number of replicas along each dimension, close to a cube."""
    # The dimension with the least room comes first; ties are broken in the order core,
    # x, y, z.
    grid = [0] * len(counts)
    remaining, dimensions = replicas, len(counts)
    if not remaining:
        return grid
    by_room = sorted(
        (int(room), (i + 1) % dimensions, i) for i, room in enumerate(counts)
    )
    for room, _, i in by_room:
        grid[i] = min(math.ceil(remaining ** (1.0 / dimensions)), room)
        remaining = -(-remaining // grid[i])
        dimensions -= 1
    return grid


def _mesh_order(shape: np.ndarray, stride: np.ndarray, grid: list[int]) -> np.ndarray:
    """Return blocks of cores in mesh order, the cores of a chip first."""
    # Grid position of each replica; the core index changes fastest, then x.
    positions = np.array(
        [(x, y, z, c) for z, y, x, c in np.ndindex(*grid[2::-1], grid[3])]
    ).reshape(-1, 4)
    offsets = positions // stride * (shape * stride) + positions % stride
    cores = np.array(list(np.ndindex(*shape))) * stride
    return cores + offsets[:, None, :]


def _ring_order(shape: np.ndarray, grid: list[int]) -> np.ndarray:
    """Return blocks of chips with the blocks, and the chips of each, in rings."""
    *chips, cores = map(int, shape)
    inner, outer = _ring(*chips), _ring(*grid[:3])
    return np.array(
        [
            [
                [*(np.array(position) * chips + chip), core]
                for chip in inner
                for core in range(cores)
            ]
            for position in outer
        ]
    )


def _task_order(
    topology: Topology, shape: np.ndarray, stride: np.ndarray, replicas: int
) -> np.ndarray:
    """Return cores task by task, for a mesh with missing devices."""
    if (stride != 1).any():
        raise ValueError(
            "computation_stride must be 1 if devices of the TPU mesh are missing. "
            f"Received: computation_stride={stride}"
        )
    cores = int(np.prod(shape))
    devices = topology.device_coordinates.reshape(-1, topology.mesh_rank)
    if replicas * cores > len(devices):
        raise ValueError(
            f"requested {replicas} replicas of {cores} cores, but the TPU has "
            f"{len(devices)} cores: devices of its mesh are missing"
        )
    used = devices[: replicas * cores]
    return used.reshape(replicas, cores, topology.mesh_rank)


def _ring(*sizes: int) -> list[tuple[int, ...]]:
    """Return the chips of a mesh in an order in which consecutive ones are adjacent."""
    x, y, z = sizes
    sides = [i for i in range(3) if sizes[i] > 1]
    if len(sides) <= 1 or any(sizes[i] % 2 for i in sides):
        # A line, or a mesh with an odd side, which has no ring.
        return [(i, j, k) for k, j, i in np.ndindex(z, y, x)]
    if len(sides) == 2:
        ring = np.zeros((x * y * z, 3), int)
        ring[1:, sides] = _plane_ring(*(sizes[i] for i in sides))
        return list(map(tuple, ring.tolist()))
    chips = [(0, 0, 0)]
    for k in range(z):
        plane = [(i, j, k) for i, j in _plane_ring(x, y)]
        chips += plane if k % 2 == 0 else plane[::-1]
    return chips + [(0, 0, k) for k in range(z - 1, 0, -1)]


def _plane_ring(width: int, height: int) -> list[tuple[int, int]]:
    """Return a plane's ring without its first chip: zigzag, then back at the edge."""
    ring = []
    for row in range(height):
        columns = range(1, width)
        ring += [(i, row) for i in (columns if row % 2 == 0 else reversed(columns))]
    return ring + [(0, row) for row in range(height - 1, 0, -1)]
