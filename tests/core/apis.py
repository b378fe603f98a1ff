"""Two replicas of this package, and of native tf.distribute, under one interface."""

import keras
import numpy as np

import keras_strategy as ks

DEVICES = [f"cpu:{i}" for i in range(2)]


class Ours:
    """Two replicas of this package."""

    name = "ours"
    get_replica_context = staticmethod(ks.get_replica_context)

    def __init__(self):
        self.strategy = ks.MirroredStrategy(DEVICES)

    def variable(self, value, **kwargs):
        with self.strategy.scope():
            return keras.Variable(np.float32(value), **kwargs)


class Native:
    """Two replicas of native tf.distribute."""

    name = "native"

    def __init__(self):
        import tensorflow as tf

        self.strategy = tf.distribute.MirroredStrategy(
            [name.upper() for name in DEVICES], tf.distribute.ReductionToOneDevice()
        )
        self.get_replica_context = tf.distribute.get_replica_context
        self._tf = tf

    def variable(self, value, synchronization="auto", aggregation="none", **kwargs):
        tf = self._tf
        with self.strategy.scope():
            return tf.Variable(
                np.float32(value),
                synchronization=tf.VariableSynchronization[synchronization.upper()],
                aggregation=tf.VariableAggregation[aggregation.upper()],
                **kwargs,
            )


# Native tf.distribute can be asked where TensorFlow runs anyway.
APIS = [Ours, Native] if keras.backend.backend() == "tensorflow" else [Ours]


def per_replica(strategy, *values):
    return strategy.experimental_distribute_values_from_function(
        lambda c: keras.ops.convert_to_tensor(
            np.asarray(values[c.replica_id_in_sync_group], "float32")
        )
    )


def number(value):
    return keras.ops.convert_to_numpy(value).tolist()


def results(strategy, value):
    return [
        number(v.value() if callable(getattr(v, "value", None)) else v)
        for v in strategy.experimental_local_results(value)
    ]


def is_mirrored(value):
    return type(value).__name__.endswith("Mirrored")
