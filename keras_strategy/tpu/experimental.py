"""Supported names of `tf.tpu.experimental`."""

from keras_strategy.strategies.tpu_system import (
    initialize_tpu_system,
    shutdown_tpu_system,
)
from keras_strategy.values.device_assignment import DeviceAssignment, DeviceOrderMode
from keras_strategy.values.tpu_topology import Topology

__all__ = [
    "DeviceAssignment",
    "DeviceOrderMode",
    "Topology",
    "initialize_tpu_system",
    "shutdown_tpu_system",
]
