"""`keras.distribution.DataParallel` on torch: a process for each replica.

It follows https://keras.io/guides/distribution/: processes as of torchrun, and a
`tf.data.Dataset` that is batched with the global batch size, which Keras shards.
"""

from typing import Any

import keras
import tensorflow as tf

from conformance.program import Program
from conformance.systems.mirrored import fit_datasets
from conformance.systems.training import Outcome, build


def run(program: Program, replicas: int, initial: Any) -> Outcome:
    tf.config.set_visible_devices([], "GPU")
    keras.distribution.initialize()
    distribution = keras.distribution.DataParallel()
    assert distribution.num_processes == replicas
    keras.distribution.set_distribution(distribution)
    return fit_datasets(build(program, initial), program)
