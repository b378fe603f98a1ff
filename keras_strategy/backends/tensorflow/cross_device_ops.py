"""Native classes for the user's choice of cross-device operations."""

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_strategy.backends.tensorflow.devices import list_devices, native_name
from keras_strategy.rules import cross_device_ops as choices
from keras_strategy.values.devices import resolve_devices

if TYPE_CHECKING:
    from keras_strategy.rules.cross_device_ops import CrossDeviceOps


def native_cross_device_ops(
    choice: "CrossDeviceOps | None", devices: tuple[str, ...]
) -> Any:
    """Return the object that native tf.distribute reduces with, or None.

    Raises:
        ValueError: If the devices do not support the choice.
    """
    on_cpu = all(device.startswith("cpu:") for device in devices)
    if choice is None:
        # On CPUs, collectives cost more than they save, and they do not work in the
        # loop of steps_per_execution.
        return tf.distribute.ReductionToOneDevice() if on_cpu else None
    if isinstance(choice, choices.ReductionToOneDevice):
        device = choice.reduce_to_device
        if device is not None:
            available = [*list_devices(), *list_devices("cpu")]
            device = native_name(resolve_devices([device], available)[0])
        return tf.distribute.ReductionToOneDevice(device)
    if isinstance(choice, choices.NcclAllReduce):
        if on_cpu:
            raise ValueError(
                "NcclAllReduce needs GPUs. Omit `cross_device_ops` to let TensorFlow "
                f"choose. Received: cross_device_ops={choice!r} for the devices "
                f"{list(devices)}"
            )
        return tf.distribute.NcclAllReduce(choice.num_packs)
    assert isinstance(choice, choices.HierarchicalCopyAllReduce)
    return tf.distribute.HierarchicalCopyAllReduce(choice.num_packs)
