"""`Topology`: where the cores of a TPU are."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_strategy.values import topology_message as message


class Topology:
    """A set of TPU devices: the shape of their mesh, and where in it each of them is.

    `keras_strategy.tpu.experimental.initialize_tpu_system` returns that of the TPU.

    Args:
        serialized: What `serialized()` of a topology gave, here or in TensorFlow; None
            takes the other two arguments.
        mesh_shape: Four positive numbers of cores: in x, y and z, and in each chip.
        device_coordinates: For each task and each of its devices, the four coordinates
            in the mesh: numbers of the shape `[tasks, devices, 4]`.

    Raises:
        ValueError: If the arguments describe no topology.

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
            self._mesh_shape, self._device_coordinates = _parsed(serialized)
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
        # By coordinates: the task that has the device there, and its number in it.
        self._tasks = np.full(self._mesh_shape, -1, np.int32)
        self._ordinals = np.full(self._mesh_shape, -1, np.int32)
        for task, devices in enumerate(self._device_coordinates):
            for ordinal, coordinates in enumerate(devices):
                self._tasks[tuple(coordinates)] = task
                self._ordinals[tuple(coordinates)] = ordinal
        self._missing_devices = np.argwhere(self._tasks < 0)

    @property
    def mesh_shape(self) -> np.ndarray:
        """The shape of the mesh: four numbers."""
        return self._mesh_shape

    @property
    def mesh_rank(self) -> int:
        """The number of dimensions of the mesh."""
        return len(self._mesh_shape)

    @property
    def device_coordinates(self) -> np.ndarray:
        """For each task and each of its devices, the coordinates in the mesh."""
        return self._device_coordinates

    @property
    def missing_devices(self) -> np.ndarray:
        """The coordinates where no device is, one in each row."""
        return self._missing_devices

    @property
    def num_tasks(self) -> int:
        """The number of tasks, which are the hosts of the TPU."""
        return self._device_coordinates.shape[0]

    @property
    def num_tpus_per_task(self) -> int:
        """The number of devices of each task."""
        return self._device_coordinates.shape[1]

    def task_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Returns the number of the task that has the device at coordinates.

        Args:
            device_coordinates: Four numbers.
        """
        return self._tasks[tuple(device_coordinates)]

    def tpu_device_ordinal_at_coordinates(
        self, device_coordinates: Sequence[int]
    ) -> int:
        """Returns the number, in its task, of the device at coordinates.

        Args:
            device_coordinates: Four numbers.
        """
        return self._ordinals[tuple(device_coordinates)]

    def cpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int], job: str | None = None
    ) -> str:
        """Returns TensorFlow's name of the host of the device at coordinates.

        Args:
            device_coordinates: Four numbers.
            job: The job of the tasks, to stand in front.
        """
        task = self.task_ordinal_at_coordinates(device_coordinates)
        return f"{_of_job(job)}/task:{task}/device:CPU:0"

    def tpu_device_name_at_coordinates(
        self, device_coordinates: Sequence[int], job: str | None = None
    ) -> str:
        """Returns TensorFlow's name of the device at coordinates.

        Args:
            device_coordinates: Four numbers.
            job: The job of the tasks, to stand in front.
        """
        task = self.task_ordinal_at_coordinates(device_coordinates)
        ordinal = self.tpu_device_ordinal_at_coordinates(device_coordinates)
        return f"{_of_job(job)}/task:{task}/device:TPU:{ordinal}"

    def serialized(self) -> bytes:
        """Returns the topology as TensorFlow writes it, a `TopologyProto`."""
        if self._serialized is None:
            numbers = {
                message.TASKS: self.num_tasks,
                message.PER_TASK: self.num_tpus_per_task,
            }
            self._serialized = b"".join(
                [
                    message.packed(message.MESH_SHAPE, self._mesh_shape),
                    *(
                        message.varint(field << 3 | message.NUMBER)
                        + message.varint(number)
                        for field, number in numbers.items()
                        if number
                    ),
                    message.packed(
                        message.COORDINATES, self._device_coordinates.flatten()
                    ),
                ]
            )
        return self._serialized


def _of_job(job: str | None) -> str:
    return "" if job is None else f"/job:{job}"


def _check_mesh_shape(shape: np.ndarray) -> None:
    if shape.shape != (4,) or (shape < 1).any():
        raise ValueError(
            "`mesh_shape` must be a sequence of 4 positive entries. Received: "
            f"mesh_shape={shape}"
        )


def _parsed(serialized: bytes) -> tuple[np.ndarray, np.ndarray]:
    """The mesh's shape, and the coordinates of the devices."""
    lists: dict[int, list[int]] = {message.MESH_SHAPE: [], message.COORDINATES: []}
    numbers = {message.TASKS: 0, message.PER_TASK: 0}
    for field, value in message.fields(serialized):
        if field in lists:
            packed = isinstance(value, bytes)
            lists[field].extend(
                message.varints(value) if packed else [message.signed(value)]
            )
        elif field in numbers and isinstance(value, int):
            numbers[field] = message.signed(value)
    shape = np.array(lists[message.MESH_SHAPE], np.int32)
    _check_mesh_shape(shape)
    tasks, per_task = numbers.values()
    for name, number in (("num_tasks", tasks), ("num_tpu_devices_per_task", per_task)):
        if number < 0:
            raise ValueError(f"`{name}` must be >= 0. Received: {name}={number}")
    coordinates = np.array(lists[message.COORDINATES], np.int32)
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
