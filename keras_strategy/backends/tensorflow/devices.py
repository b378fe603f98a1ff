"""Device names: canonical ones (`cpu:0`) and TensorFlow's (`/device:CPU:0`)."""

import tensorflow as tf


def list_devices(device_type: str | None = None) -> list[str]:
    """Return the canonical names of the local devices, and initialize TensorFlow's."""
    if device_type is None:
        return list_devices("gpu") or list_devices("cpu")
    found = tf.config.list_logical_devices(device_type.upper())
    return [f"{device_type.lower()}:{index}" for index in range(len(found))]


def native_name(device: str) -> str:
    """Return TensorFlow's name of a canonical device name."""
    kind, index = device.split(":")
    return f"/device:{kind.upper()}:{index}"


def set_logical_devices(device_type: str, count: int) -> None:
    """Split the first physical device of a type into logical ones."""
    kind = device_type.upper()
    physical = tf.config.list_physical_devices(kind)[0]
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    try:
        tf.config.set_logical_device_configuration(physical, logical)
    except RuntimeError:
        initialized = len(tf.config.list_logical_devices(kind))
        if initialized == count:
            return
        raise RuntimeError(
            f"TensorFlow has already initialized {initialized} {device_type} "
            f"device(s), and cannot change this to {count}. Call "
            "`set_logical_devices` at the start of the program, before you create a "
            "tensor, a variable or a strategy. In a notebook, restart the kernel first."
        ) from None
