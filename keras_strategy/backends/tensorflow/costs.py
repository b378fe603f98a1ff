"""Sizes of a training step on TensorFlow, in a graph that never runs."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_strategy.core.protocols import PlannedStep
from keras_strategy.keras_patches.sharded_slots import local_bytes as local_bytes


def without_memory(fn: Callable[[], Any]) -> Any:
    with tf.Graph().as_default():
        return fn()


def measure_step(_: PlannedStep) -> str:
    return "TensorFlow allocates as its runtime decides."


def profile(train: Callable[[int], None], steps: int) -> None:
    """Return None: TensorFlow's profiler writes for TensorBoard only."""
