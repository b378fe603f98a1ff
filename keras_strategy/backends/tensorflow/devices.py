"""TensorFlow's devices, by the names that this package uses."""

import tensorflow as tf


def list_devices(device_type: str | None = None) -> list[str]:
    """See `Backend.list_devices`. Initializes TensorFlow's devices."""
    if device_type is None:
        return list_devices("gpu") or list_devices("cpu")
    found = tf.config.list_logical_devices(device_type.upper())
    return [f"{device_type.lower()}:{index}" for index in range(len(found))]


def native_name(device: str) -> str:
    """TensorFlow's name of the device that we call `device`."""
    kind, index = device.split(":")
    return f"/device:{kind.upper()}:{index}"


def set_logical_devices(device_type: str, count: int) -> None:
    """See `Backend.set_logical_devices`.

    Raises:
        RuntimeError: If TensorFlow has initialized another number of devices.
    """
    kind = device_type.upper()
    physical = tf.config.list_physical_devices(kind)[0]
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    try:
        tf.config.set_logical_device_configuration(physical, logical)
    except RuntimeError:
        there_are = len(tf.config.list_logical_devices(kind))
        if there_are == count:
            return
        raise RuntimeError(
            f"TensorFlow has already initialized {there_are} {device_type} device(s), "
            f"which cannot become {count} any more. Call `set_logical_devices` at "
            "the start of the program, before a tensor, a variable or a strategy is "
            "made; in a notebook, restart the kernel first."
        ) from None
