"""Supported names of `tf.tpu.experimental`."""

from keras_strategy.strategies.tpu import initialize_tpu_system, shutdown_tpu_system
from keras_strategy.topology import DeviceAssignment, DeviceOrderMode, Topology

__all__ = [
    "DeviceAssignment",
    "DeviceOrderMode",
    "Topology",
    "initialize_tpu_system",
    "shutdown_tpu_system",
]
