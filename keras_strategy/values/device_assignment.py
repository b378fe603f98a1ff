"""Assignment of TPU cores to the logical devices of replicas."""

import enum
import math
from typing import Any

import numpy as np

from keras_strategy.values.tpu_topology import Topology


class DeviceOrderMode(enum.IntEnum):
    """Order in which `DeviceAssignment.build` takes the cores."""

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

    def host_device(
        self, replica: int = 0, logical_core: int = 0, job: str | None = None
    ) -> str:
        """Return TensorFlow's name of a logical device's host CPU.

        Args:
            replica: The replica id.
            logical_core: The index of its logical device.
            job: The job name to prepend.
        """
        coordinates = self.coordinates(replica, logical_core)
        return self._topology.cpu_device_name_at_coordinates(coordinates, job=job)

    def tpu_device(
        self, replica: int = 0, logical_core: int = 0, job: str | None = None
    ) -> str:
        """Return TensorFlow's name of a logical device's core.

        Args:
            replica: The replica id.
            logical_core: The index of its logical device.
            job: The job name to prepend.
        """
        coordinates = self.coordinates(replica, logical_core)
        return self._topology.tpu_device_name_at_coordinates(coordinates, job=job)

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
        blocks = _Blocks(topology.mesh_shape, shape, stride, num_replicas)
        if topology.missing_devices.size:
            return cls(topology, _task_order_coordinates(topology, blocks))
        rings = blocks.can_be_rings
        if device_order_mode == DeviceOrderMode.RING and not rings:
            raise ValueError(
                "device_order_mode=DeviceOrderMode.RING is not compatible with the "
                "3D tiling of this topology: each replica must use all cores of its "
                "chips without a stride, and the replicas together must use the "
                "whole TPU. Use device_order_mode=DeviceOrderMode.AUTO."
            )
        as_rings = rings and device_order_mode != DeviceOrderMode.MESH
        return cls(topology, blocks.rings() if as_rings else blocks.meshes())


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


class _Blocks:
    """The blocks of the replicas in a complete mesh.

    Args:
        mesh: The mesh shape.
        shape: The shape of a block, in cores.
        stride: The distance of its cores.
        replicas: The number of replicas.
    """

    def __init__(
        self, mesh: np.ndarray, shape: np.ndarray, stride: np.ndarray, replicas: int
    ):
        self.mesh, self.shape, self.stride = mesh, shape, stride
        self.replicas = replicas
        footprint = shape * stride
        if (footprint > mesh).any():
            raise ValueError(
                f"computation footprint {footprint} does not fit in TPU topology shape "
                f"{mesh}"
            )
        self.footprint = footprint
        # Other blocks fit between the cores of a block with a stride.
        self.counts = mesh // footprint * stride
        self.max_replicas = int(np.prod(self.counts))
        if replicas > self.max_replicas:
            raise ValueError(
                f"requested {replicas} replicas but only {self.max_replicas} replicas "
                f"with shape {shape} and computation_stride {stride} fit in a TPU mesh "
                f"of shape {mesh}"
            )

    @property
    def can_be_rings(self) -> bool:
        """True if blocks consist of whole chips and fill the mesh."""
        return bool(
            self.shape[-1] == self.mesh[-1]
            and (self.stride == 1).all()
            and self.replicas == self.max_replicas
        )

    def _grid(self) -> list[int]:
        """Return the number of replicas along each dimension, close to a cube.

        The dimension with the least room comes first; ties are broken in the order
        core, x, y, z.
        """
        grid = [0] * len(self.mesh)
        remaining, dimensions = self.replicas, len(self.mesh)
        if not remaining:
            return grid
        by_room = sorted(
            (int(room), (i + 1) % dimensions, i) for i, room in enumerate(self.counts)
        )
        for room, _, i in by_room:
            grid[i] = min(math.ceil(remaining ** (1.0 / dimensions)), room)
            remaining = -(-remaining // grid[i])
            dimensions -= 1
        return grid

    def meshes(self) -> np.ndarray:
        """Return the coordinates in mesh order, the cores of a chip first."""
        grid = self._grid()
        # Grid position of each replica; the core index changes fastest, then x.
        positions = np.array(
            [(x, y, z, c) for z, y, x, c in np.ndindex(*grid[2::-1], grid[3])]
        ).reshape(-1, 4)[: self.replicas]
        offsets = positions // self.stride * self.footprint + positions % self.stride
        steps = [
            np.arange(0, size * step, step)
            for size, step in zip(self.shape, self.stride, strict=True)
        ]
        cores = np.stack(np.meshgrid(*steps, indexing="ij"), axis=-1).reshape(-1, 4)
        return cores + offsets[:, None, :]

    def rings(self) -> np.ndarray:
        """Return the coordinates with replicas, and the chips of each, in rings."""
        inner, outer = _ring(*map(int, self.shape[:3])), _ring(*self._grid()[:3])
        return np.array(
            [
                [
                    [*(np.array(position) * self.shape[:3] + chip), core]
                    for chip in inner
                    for core in range(self.mesh[-1])
                ]
                for position in outer
            ]
        )


def _task_order_coordinates(topology: Topology, blocks: _Blocks) -> np.ndarray:
    """Return the coordinates task by task, for a mesh with missing devices."""
    if (blocks.stride != 1).any():
        raise ValueError(
            "computation_stride must be 1 if devices of the TPU mesh are missing. "
            f"Received: computation_stride={blocks.stride}"
        )
    cores = int(np.prod(blocks.shape))
    devices = topology.device_coordinates.reshape(-1, topology.mesh_rank)
    if blocks.replicas * cores > len(devices):
        raise ValueError(
            f"requested {blocks.replicas} replicas of {cores} cores, but the TPU has "
            f"{len(devices)} cores: devices of its mesh are missing"
        )
    used = devices[: blocks.replicas * cores]
    return used.reshape(blocks.replicas, cores, topology.mesh_rank)


def _ring(x: int, y: int, z: int) -> list[tuple[int, int, int]]:
    """Return the chips of a mesh in an order in which consecutive ones are adjacent."""
    sizes = (x, y, z)
    if sum(size > 1 for size in sizes) <= 1 or any(s > 1 and s % 2 for s in sizes):
        # A line, or a mesh with an odd side, which has no ring.
        return [(i, j, k) for k, j, i in np.ndindex(z, y, x)]
    first = [(0, 0, 0)]
    if z == 1:
        return first + [(i, j, 0) for i, j in _plane_ring(x, y)]
    if y == 1:
        return first + [(i, 0, k) for i, k in _plane_ring(x, z)]
    if x == 1:
        return first + [(0, j, k) for j, k in _plane_ring(y, z)]
    ring = first
    for k in range(z):
        plane = [(i, j, k) for i, j in _plane_ring(x, y)]
        ring += plane if k % 2 == 0 else plane[::-1]
    return ring + [(0, 0, k) for k in range(z - 1, 0, -1)]


def _plane_ring(width: int, height: int) -> list[tuple[int, int]]:
    """Return a plane's ring without its first chip: zigzag, then back at the edge."""
    ring = []
    for row in range(height):
        columns = range(1, width)
        ring += [(i, row) for i in (columns if row % 2 == 0 else reversed(columns))]
    return ring + [(0, row) for row in range(height - 1, 0, -1)]
