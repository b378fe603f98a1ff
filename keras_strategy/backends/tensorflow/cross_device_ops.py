"""The native class for each choice of how values are combined."""

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
    """Returns what native tf.distribute shall reduce with.

    Args:
        choice: What the user chose, or None.
        devices: Canonical names of the devices.

    Raises:
        ValueError: If these devices cannot do it.
    """
    on_cpu = all(device.startswith("cpu:") for device in devices)
    if choice is None:
        # On CPUs collectives cost more than they save, and they do not work in the
        # loop that steps_per_execution makes.
        return tf.distribute.ReductionToOneDevice() if on_cpu else None
    if isinstance(choice, choices.ReductionToOneDevice):
        device = choice.reduce_to_device
        if device is not None:
            there_is = [*list_devices(), *list_devices("cpu")]
            device = native_name(resolve_devices([device], there_is)[0])
        return tf.distribute.ReductionToOneDevice(device)
    if isinstance(choice, choices.NcclAllReduce):
        if on_cpu:
            raise ValueError(
                "NcclAllReduce needs GPUs; leave `cross_device_ops` out to let "
                f"TensorFlow choose. Received: cross_device_ops={choice!r} for the "
                f"devices {list(devices)}"
            )
        return tf.distribute.NcclAllReduce(choice.num_packs)
    assert isinstance(choice, choices.HierarchicalCopyAllReduce)
    return tf.distribute.HierarchicalCopyAllReduce(choice.num_packs)
