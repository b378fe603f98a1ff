"""Keras on `tf.distribute.MirroredStrategy`, on logical CPU devices.

It follows https://keras.io/guides/distributed_training_with_tensorflow/: build, compile
and `fit` in the scope, with a `tf.data.Dataset` of global batches.
"""

from typing import Any

import keras
import tensorflow as tf

from conformance.program import Program
from conformance.systems.training import Outcome, build, fit_data


def prepare(replicas: int) -> None:
    (cpu,) = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration()] * replicas
    tf.config.set_logical_device_configuration(cpu, logical)


def dataset(program: Program, rows: int) -> tf.data.Dataset:
    """Return batches of rows of a program's data."""
    data = program.data(rows)
    parts = (data.x, data.y)
    if data.sample_weight is not None:
        parts = (*parts, data.sample_weight)
    return tf.data.Dataset.from_tensor_slices(parts).batch(program.batch_size)


def run(program: Program, replicas: int, initial: Any) -> Outcome:
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    with strategy.scope():
        return fit_datasets(build(program, initial), program)


def fit_datasets(model: keras.Model, program: Program) -> Outcome:
    """Train by `fit` on a program's batches."""
    how = {}
    if program.validation:
        how["validation_data"] = dataset(program, program.validation)
    return fit_data(model, program, dataset(program, program.rows), **how)
