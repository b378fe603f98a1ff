"""`keras.distribution.DataParallel` on JAX: one process and several devices.

It follows https://keras.io/guides/distribution/: set the distribution, then build the
model and call `fit` as on one device.
"""

from typing import Any

import jax
import keras

from conformance.program import Program
from conformance.systems.training import Outcome, build, fit


def prepare(replicas: int) -> None:
    jax.config.update("jax_num_cpu_devices", replicas)


def run(program: Program, replicas: int, initial: Any) -> Outcome:
    devices = keras.distribution.list_devices()
    assert len(devices) == replicas
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    return fit(build(program, initial), program)
