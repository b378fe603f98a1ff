"""`keras.distribution.DataParallel` on torch: a process for each replica.

It follows https://keras.io/guides/distribution/: processes as of torchrun, and a
`tf.data.Dataset` that is batched with the global batch size, which Keras shards.
"""

from typing import Any

import keras
import tensorflow as tf

from conformance.program import Program
from conformance.systems.mirrored import dataset
from conformance.systems.training import Outcome, build, fit_data


def run(program: Program, replicas: int, initial: Any) -> Outcome:
    """Set the distribution and train by `fit`."""
    tf.config.set_visible_devices([], "GPU")
    keras.distribution.initialize()
    distribution = keras.distribution.DataParallel()
    assert distribution.num_processes == replicas
    keras.distribution.set_distribution(distribution)
    model = build(program, initial)
    how = {}
    if program.validation:
        how["validation_data"] = dataset(program, program.validation)
    return fit_data(model, program, dataset(program, program.rows), **how)
