"""A strategy of two replicas and, on TensorFlow, native tf.distribute's."""

import keras
import numpy as np
import pytest

import keras_strategy as ks

TENSORFLOW = keras.backend.backend() == "tensorflow"
if TENSORFLOW:
    import tensorflow as tf


class Api:
    """The names of tf.distribute and one strategy of two replicas."""

    def __init__(self, module, strategy, value_types):
        self.module, self.ours = module, module is ks
        self.s = strategy
        self.value_types = value_types
        self.two_rows = self.per_replica([1.0, 2.0], [3.0, 5.0])
        self.partial = self.per_replica([1.0, 2.0, 3.0, 4.0], [5.0, 6.0])
        self.scalars = self.per_replica(1.0, 3.0)

    def per_replica(self, *values, dtype="float32"):
        return self.s.experimental_distribute_values_from_function(
            lambda c: tensor(values[c.replica_id_in_sync_group], dtype)
        )

    def rc(self):
        return self.module.get_replica_context()

    def local(self, value):
        """The value of each replica, with lists in the place of tensors."""
        parts = self.s.experimental_local_results(value)
        return [plain(part) for part in parts] * (2 if len(parts) == 1 else 1)


def tensor(value, dtype="float32"):
    return keras.ops.convert_to_tensor(np.asarray(value, dtype))


def plain(value):
    return keras.tree.map_structure(
        lambda x: keras.ops.convert_to_numpy(x).tolist() if hasattr(x, "dtype") else x,
        value,
    )


@pytest.fixture(params=["ours", "native"] if TENSORFLOW else ["ours"])
def api(request, two):
    if request.param == "ours":
        return Api(ks, two, ks.DistributedValues)
    strategy = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice()
    )
    return Api(tf.distribute, strategy, tf.distribute.DistributedValues)
