"""TPU topology and the assignment of its cores to replicas."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_strategy.values.topology_message import (
    COORDINATES,
    MESH_SHAPE,
    NUMBER,
    PER_TASK,
    TASKS,
    decode_fields,
    decode_varints,
    encode_packed,
    encode_varint,
    to_signed,
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

    def cpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int], job: str | None = None
    ) -> str:
        """Return TensorFlow's name of the device's host CPU.

        Args:
            device_coordinates: Four mesh coordinates.
            job: The job name to prepend.
        """
        task = self.task_ordinal_at_coordinates(device_coordinates)
        return f"{_job_prefix(job)}/task:{task}/device:CPU:0"

    def tpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int], job: str | None = None
    ) -> str:
        """Return TensorFlow's name of the device.

        Args:
            device_coordinates: Four mesh coordinates.
            job: The job name to prepend.
        """
        task = self.task_ordinal_at_coordinates(device_coordinates)
        ordinal = self.tpu_device_ordinal_at_coordinates(device_coordinates)
        return f"{_job_prefix(job)}/task:{task}/device:TPU:{ordinal}"

    def serialized(self) -> bytes:
        """Return the topology as a serialized `TopologyProto`."""
        if self._serialized is None:
            numbers = {TASKS: self.num_tasks, PER_TASK: self.num_tpus_per_task}
            scalars = [
                encode_varint(field << 3 | NUMBER) + encode_varint(number)
                for field, number in numbers.items()
                if number
            ]
            self._serialized = b"".join(
                [
                    encode_packed(MESH_SHAPE, self._mesh_shape),
                    *scalars,
                    encode_packed(COORDINATES, self._device_coordinates.flatten()),
                ]
            )
        return self._serialized


def _job_prefix(job: str | None) -> str:
    return "" if job is None else f"/job:{job}"


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
                lists[field].append(to_signed(value))
        elif field in numbers and isinstance(value, int):
            numbers[field] = to_signed(value)
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
