"""Users' programs: state, tensors kept on a layer, logs, other modules."""

import pkgutil
from collections.abc import Iterator

import keras
from keras import layers, ops

from conformance import models
from conformance.equality.cases.case import Case, in_mlp
from conformance.models import compiled, mlp


class Summing(layers.Layer):
    """Adds up its inputs, as a guide of Keras does, and counts the steps."""

    def __init__(self):
        super().__init__()
        self.total = self.add_weight(
            shape=(8,), initializer="zeros", trainable=False, aggregation="sum"
        )
        self.steps = self.add_weight(
            shape=(), initializer="zeros", trainable=False, dtype="int32"
        )

    def call(self, x, training=False):
        """Return the inputs."""
        if training:
            self.total.assign_add(ops.sum(x, axis=0))
            self.steps.assign_add(1)
        return x


class MovingMean(layers.Layer):
    """Subtracts a moving mean of its inputs."""

    def __init__(self):
        super().__init__()
        self.mean = self.add_weight(
            shape=(8,), initializer="zeros", trainable=False, aggregation="mean"
        )

    def call(self, x, training=False):
        """Subtract the mean of the steps before."""
        before = self.mean + 0.0
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
        return x - before


class Skip(keras.Model):
    """Keeps a tensor on itself, in a list and on another layer during a call."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(8, "tanh")
        self.second = layers.Dense(8, "tanh")
        self.last = layers.Dense(1)
        self.skip = None
        self.skips = []

    def call(self, x):
        """Add the kept tensors to a later one."""
        self.skip = self.first(x)
        self.skips.append(self.skip)
        self.second.skip = self.second(self.skip)
        return self.last(self.skips.pop() + self.skip + self.second.skip)


class Derived(keras.Model):
    """Logs what it computes of the results of metrics, under names of its own."""

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.area = keras.metrics.AUC(name="auc_metric")
        self.error = keras.metrics.MeanAbsoluteError(name="error")

    def call(self, x):
        """Return a probability."""
        return ops.sigmoid(self.body(x))

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        """Add a result under another name, and a formula of results."""
        self.area.update_state(y, y_pred)
        self.error.update_state(y, y_pred)
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        error = self.error.result()
        return {**logs, "auc": self.area.result(), "root": ops.sqrt(error) / 2}


def foreign() -> keras.Model:
    """Return a model with a module of torch in the middle."""
    # Not imported at the top: the table knows no backend.
    linear = pkgutil.resolve_name("torch.nn:Linear")(models.FEATURES, 8)
    inputs = keras.Input((models.FEATURES,))
    hidden = layers.TorchModuleWrapper(linear, output_shape=(None, 8))(inputs)
    return keras.Model(inputs, layers.Dense(1)(layers.Activation("tanh")(hidden)))


def cases() -> Iterator[Case]:
    """Yield users' programs."""
    yield Case("custom state: a sum, and a count of steps", in_mlp(Summing))
    yield Case("custom state: a moving mean", in_mlp(MovingMean))
    yield Case("tensors that a call keeps on layers", lambda: compiled(Skip()))
    yield Case(
        "logs that are computed of metrics' results",
        lambda: compiled(Derived(), loss="binary_crossentropy", metrics=["accuracy"]),
        models.binary,
    )
    reason = "Keras takes modules of torch on torch alone"
    yield Case(
        "a module of torch",
        lambda: compiled(foreign()),
        not_on={"jax": reason, "tensorflow": reason},
    )
