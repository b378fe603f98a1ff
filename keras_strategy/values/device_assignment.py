"""`DeviceAssignment`: which core of a TPU is which logical device of which replica."""

import enum
import math
from typing import Any

import numpy as np

from keras_strategy.values.tpu_topology import Topology


class DeviceOrderMode(enum.IntEnum):
    """In which order `DeviceAssignment.build` takes the cores."""

    # Rings where they are possible, else meshes.
    AUTO = 0
    # Rings, of replicas and of each replica's cores.
    RING = 1
    # Meshes.
    MESH = 2


class DeviceAssignment:
    """Maps the logical devices of each replica to the cores of a TPU.

    `DeviceAssignment.build` makes the usual ones.

    Args:
        topology: The TPU's `Topology`.
        core_assignment: For each replica and each of its logical devices, the four
            coordinates of a core: numbers of the shape
            `[replicas, logical devices, 4]`.

    Raises:
        ValueError: If `topology` is none, or `core_assignment` of another shape.

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
        """For each replica and logical device the coordinates of its core."""
        return self._core_assignment

    def coordinates(self, replica: int, logical_core: int) -> tuple[int, ...]:
        """Returns the coordinates of a logical device.

        Args:
            replica: The replica's number.
            logical_core: The number of its logical device.
        """
        return tuple(self._core_assignment[replica, logical_core, :])

    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """Returns the numbers of the replicas that have a logical device on a task.

        Args:
            task_id: The task's number.
            logical_core: The number of the logical device.

        Raises:
            ValueError: If there is none.
        """
        found = self._replicas.get((task_id, logical_core))
        if found is None:
            raise ValueError(
                f"Can not find any replica in task: {task_id} contains logical_core: "
                f"{logical_core}"
            )
        return found

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """Returns the number, in its task, of the core of a logical device.

        Args:
            replica: The replica's number.
            logical_core: The number of its logical device.
        """
        coordinates = self.coordinates(replica, logical_core)
        return self._topology.tpu_device_ordinal_at_coordinates(coordinates)

    def host_device(
        self, replica: int = 0, logical_core: int = 0, job: str | None = None
    ) -> str:
        """Returns TensorFlow's name of the host of a logical device.

        Args:
            replica: The replica's number.
            logical_core: The number of its logical device.
            job: The job of the tasks, to stand in front.
        """
        coordinates = self.coordinates(replica, logical_core)
        return self._topology.cpu_device_name_at_coordinates(coordinates, job=job)

    def tpu_device(
        self, replica: int = 0, logical_core: int = 0, job: str | None = None
    ) -> str:
        """Returns TensorFlow's name of the core of a logical device.

        Args:
            replica: The replica's number.
            logical_core: The number of its logical device.
            job: The job of the tasks, to stand in front.
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
        """Gives each replica a compact block of cores.

        Args:
            topology: The TPU's `Topology`, or what its `serialized()` gave.
            computation_shape: The shape of a replica's block: four numbers of cores.
                None is one core.
            computation_stride: How far its cores are from each other, in each
                dimension. None is next to each other.
            num_replicas: The number of replicas.
            device_order_mode: The order of the cores, a `DeviceOrderMode`.

        Returns:
            A `DeviceAssignment`.

        Raises:
            ValueError: If an argument is of another kind, or so many replicas do not
                fit.
        """
        if isinstance(topology, bytes):
            topology = Topology(serialized=topology)
        if not isinstance(topology, Topology):
            raise ValueError(
                "`topology` is not a Topology object. Received: topology="
                f"{topology!r} of type {type(topology).__name__}"
            )
        rank = topology.mesh_rank
        shape = _four("computation_shape", computation_shape, rank)
        stride = _four("computation_stride", computation_stride, rank)
        blocks = _Blocks(topology.mesh_shape, shape, stride, num_replicas)
        if topology.missing_devices.size:
            return cls(topology, _in_order_of_tasks(topology, blocks))
        rings = blocks.can_be_rings
        if device_order_mode == DeviceOrderMode.RING and not rings:
            raise ValueError(
                "device_order_mode=DeviceOrderMode.RING is not compatible with the "
                "3D tiling of this topology: it takes replicas that have all cores of "
                "their chips, without a stride, and together all of the TPU. Use "
                "device_order_mode=DeviceOrderMode.AUTO."
            )
        as_rings = rings and device_order_mode != DeviceOrderMode.MESH
        return cls(topology, blocks.rings() if as_rings else blocks.meshes())


def _four(name: str, value: Any, rank: int) -> np.ndarray:
    """The argument of that name as an array of positive numbers."""
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
    """The blocks of the replicas in a mesh that has them all.

    Args:
        mesh: The mesh's shape.
        shape: A block's, in cores.
        stride: How far its cores are from each other.
        replicas: How many there are.

    Raises:
        ValueError: If so many do not fit.
    """

    def __init__(
        self, mesh: np.ndarray, shape: np.ndarray, stride: np.ndarray, replicas: int
    ):
        self.mesh, self.shape, self.stride, self.replicas = (
            mesh,
            shape,
            stride,
            replicas,
        )
        footprint = shape * stride
        if (footprint > mesh).any():
            raise ValueError(
                f"computation footprint {footprint} does not fit in TPU topology shape "
                f"{mesh}"
            )
        self.footprint = footprint
        # Blocks with a stride leave room for others between their cores.
        self.counts = mesh // footprint * stride
        self.most = int(np.prod(self.counts))
        if replicas > self.most:
            raise ValueError(
                f"requested {replicas} replicas but only {self.most} replicas with "
                f"shape {shape} and computation_stride {stride} fit in a TPU mesh of "
                f"shape {mesh}"
            )

    @property
    def can_be_rings(self) -> bool:
        """Whether whole chips make up the blocks, and the blocks the mesh."""
        return bool(
            self.shape[-1] == self.mesh[-1]
            and (self.stride == 1).all()
            and self.replicas == self.most
        )

    def _grid(self) -> list[int]:
        """How many replicas are along each dimension: as near to a cube as may be.

        The dimension that has least room is served first; of equal ones that of the
        cores of a chip, then x, y and z.
        """
        grid = [0] * len(self.mesh)
        left, dimensions = self.replicas, len(self.mesh)
        if not left:
            return grid
        by_room = sorted(
            (int(room), (i + 1) % dimensions, i) for i, room in enumerate(self.counts)
        )
        for room, _, i in by_room:
            grid[i] = min(math.ceil(left ** (1.0 / dimensions)), room)
            left = -(-left // grid[i])
            dimensions -= 1
        return grid

    def meshes(self) -> np.ndarray:
        """The coordinates, where replica follows replica, a chip's cores first."""
        grid = self._grid()
        # Of each replica its place in the grid; the cores change fastest, then x.
        places = np.array(
            [(x, y, z, c) for z, y, x, c in np.ndindex(*grid[2::-1], grid[3])]
        ).reshape(-1, 4)[: self.replicas]
        offsets = places // self.stride * self.footprint + places % self.stride
        steps = [
            np.arange(0, size * step, step)
            for size, step in zip(self.shape, self.stride, strict=True)
        ]
        cores = np.stack(np.meshgrid(*steps, indexing="ij"), axis=-1).reshape(-1, 4)
        return cores + offsets[:, None, :]

    def rings(self) -> np.ndarray:
        """The coordinates, where the replicas, and the chips of each, are a ring."""
        inner, outer = _ring(*map(int, self.shape[:3])), _ring(*self._grid()[:3])
        return np.array(
            [
                [
                    [*(np.array(place) * self.shape[:3] + chip), core]
                    for chip in inner
                    for core in range(self.mesh[-1])
                ]
                for place in outer
            ]
        )


def _in_order_of_tasks(topology: Topology, blocks: _Blocks) -> np.ndarray:
    """The coordinates where some of a mesh is missing: task by task."""
    if (blocks.stride != 1).any():
        raise ValueError(
            "computation_stride must be 1 where devices of the TPU are missing. "
            f"Received: computation_stride={blocks.stride}"
        )
    cores = int(np.prod(blocks.shape))
    devices = topology.device_coordinates.reshape(-1, topology.mesh_rank)
    if blocks.replicas * cores > len(devices):
        raise ValueError(
            f"requested {blocks.replicas} replicas of {cores} cores, but the TPU has "
            f"{len(devices)} cores: some of its mesh are missing"
        )
    used = devices[: blocks.replicas * cores]
    return used.reshape(blocks.replicas, cores, topology.mesh_rank)


def _ring(x: int, y: int, z: int) -> list[tuple[int, int, int]]:
    """The chips of a mesh in an order in which neighbours are neighbours.

    Args:
        x: The mesh's size in each dimension.
        y: See `x`.
        z: See `x`.
    """
    sizes = (x, y, z)
    if sum(size > 1 for size in sizes) <= 1 or any(s > 1 and s % 2 for s in sizes):
        # A line; or a mesh with an odd side, through which no ring goes.
        return [(i, j, k) for k, j, i in np.ndindex(z, y, x)]
    first = [(0, 0, 0)]
    if z == 1:
        return first + [(i, j, 0) for i, j in _open_ring(x, y)]
    if y == 1:
        return first + [(i, 0, k) for i, k in _open_ring(x, z)]
    if x == 1:
        return first + [(0, j, k) for j, k in _open_ring(y, z)]
    ring = first
    for k in range(z):
        plane = [(i, j, k) for i, j in _open_ring(x, y)]
        ring += plane if k % 2 == 0 else plane[::-1]
    return ring + [(0, 0, k) for k in range(z - 1, 0, -1)]


def _open_ring(width: int, height: int) -> list[tuple[int, int]]:
    """The ring of a plane without its first place: to and fro, and back at the edge."""
    ring = []
    for row in range(height):
        columns = range(1, width)
        ring += [(i, row) for i in (columns if row % 2 == 0 else reversed(columns))]
    return ring + [(0, row) for row in range(height - 1, 0, -1)]
