"""Programs whose steps cannot be split by rows: each compares the rows of a batch."""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import keras_strategy as ks
from conformance import models

BACKEND = keras.backend.backend()
# By batches of 8 the last one has 4 rows: even ones, as some programs need.
X, Y = models.regression(20)


class Centering(layers.Layer):
    """Subtracts the mean of the batch."""

    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


def subtract_mean(x, factor):
    return x - factor * ops.mean(x, axis=0, keepdims=True)


def functional_ops():
    """Keras's operations over the batch dimension."""
    inputs = keras.Input((4,))
    hidden = layers.Dense(3, use_bias=False)(inputs)
    centered = hidden - ops.mean(hidden, axis=0, keepdims=True)
    return models.compiled(keras.Model(inputs, layers.Dense(1)(ops.tanh(centered))))


class Halves(keras.Sequential):
    """Two views in one batch, which the loss compares."""

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        first, second = ops.split(y_pred, 2, axis=0)
        return ops.mean(ops.square(first * second - 0.5))


class HardestRows(keras.Sequential):
    """Trains on the 3 rows with the largest error."""

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        return ops.mean(ops.top_k(ops.square(y - y_pred)[:, 0], 3)[0])


class GroupDeviation(layers.Layer):
    """Appends the standard deviation of groups of 4 rows, as StyleGAN2 does."""

    def call(self, x):
        groups = ops.reshape(x, (4, -1, x.shape[-1]))
        deviation = ops.mean(ops.std(groups, axis=0), axis=-1, keepdims=True)
        return ops.concatenate([x, ops.tile(deviation, (4, 1))], axis=-1)

    def compute_output_shape(self, shape):
        return (*shape[:-1], shape[-1] + 1)


def pairs():
    """A row of scores for each pair of rows; the labels are rows, as in CLIP."""
    inputs = keras.Input((4,))
    query = layers.Dense(3)(inputs)
    model = keras.Model(inputs, ops.matmul(query, ops.transpose(query)))
    loss = keras.losses.sparse_categorical_crossentropy
    return models.compiled(model, loss=lambda y, p: loss(y, p, from_logits=True))


PAIR_LABELS = np.arange(len(X), dtype="int32") % 8


def compare_rows(y_true, y_pred, factor=1.0):
    """A number for each row, which depends on the others."""
    others = ops.max(y_pred - ops.transpose(y_pred), axis=1)
    return ops.mean(ops.square(y_true - y_pred), axis=-1) + factor * others


class HasMethod:
    def loss(self, y_true, y_pred):
        return compare_rows(y_true, y_pred)


class HasSlots:
    __slots__ = ()

    def __call__(self, y_true, y_pred):
        return compare_rows(y_true, y_pred)


@functools.wraps(keras.losses.mean_squared_error)
def wrapped(y_true, y_pred):
    return compare_rows(y_true, y_pred)


class UnusedLayer(keras.Model):
    """One of its layers is never called."""

    def __init__(self):
        super().__init__()
        self.body, self.unused = models.mlp(Centering), layers.Dense(3)

    def call(self, x):
        return self.body(x)


class HostRandom(layers.Layer):
    """Draws as LayerDrop and Mixup do, from generators of the process."""

    def call(self, x, training=False):
        return x * float(np.random.rand() + random.random()) if training else x


class RareBranch(layers.Layer):
    """A branch that only some rows need, and so only some replicas."""

    def __init__(self):
        super().__init__()
        self.usual, self.rare = layers.Dense(2), layers.Dense(2)

    def build(self, shape):
        self.usual.build(shape)
        self.rare.build(shape)

    def call(self, x):
        result = self.usual(x)
        # Without rows it is called symbolically.
        if x.shape[0] is None or not bool(ops.any(x[:, 0] > 1)):
            return result
        return result + self.rare(x) * ops.cast(x[:, :1] > 1, x.dtype)

    def compute_output_shape(self, shape):
        return (*shape[:-1], 2)


def rare_branch():
    """Without Adam, which scales the rounding of gradients near zero up."""
    model = keras.Sequential([keras.Input((4,)), RareBranch(), layers.Dense(1)])
    return models.compiled(model, keras.optimizers.SGD(0.1), run_eagerly=True)


def float8():
    model = keras.Sequential([keras.Input((16,)), layers.Dense(16)])
    model.quantize("float8")
    return models.compiled(model, keras.optimizers.SGD(0.05))


WIDE = np.random.RandomState(0).randn(len(X), 16).astype("float32")
WIDE[1] *= 6


class Centers(layers.Layer):
    """Pulls rows towards a center, which is a moving mean of the rows."""

    def build(self, shape):
        self.center = self.add_weight(
            shape=shape[1:], initializer="zeros", trainable=False, name="center"
        )

    def call(self, x, training=False):
        self.add_loss(0.1 * ops.mean(ops.square(x - self.center)))
        if training:
            self.center.assign(0.9 * self.center + 0.1 * ops.mean(x, axis=0))
        return x


class DataDependentShift(layers.Layer):
    """Its first batch decides what it subtracts."""

    def build(self, shape):
        options = {"initializer": "zeros", "trainable": False}
        self.shift = self.add_weight(shape=shape[1:], name="shift", **options)
        self.is_set = self.add_weight(shape=(), name="is_set", **options)

    def call(self, x, training=False):
        if training:
            shift, mean = ops.convert_to_tensor(self.shift), ops.mean(x, axis=0)
            self.shift.assign(ops.where(self.is_set > 0, shift, mean))
            self.is_set.assign(1.0)
        return x - self.shift


class Accumulating(keras.Sequential):
    """Adds gradients up in the step and applies those of two batches."""

    def make_state(self):
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.sums = [
            self.add_weight(shape=v.shape, initializer="zeros", trainable=False)
            for v in self.trainable_variables
        ]
        return self

    def train_step(self, data):
        x, y = data
        loss, gradients = ks.value_and_grad(
            lambda: ops.mean(ops.square(self(x) - y)), self.trainable_variables
        )()
        self.steps.assign_add(1.0)
        is_second = ops.cast(ops.equal(self.steps % 2.0, 0.0), "float32")
        for total, gradient in zip(self.sums, gradients, strict=True):
            total.assign_add(gradient)
        sums = [total * is_second for total in self.sums]
        self.optimizer.apply(sums, self.trainable_variables)
        for total in self.sums:
            total.assign(total * (1.0 - is_second))
        return {"loss": loss}


class StepOptimizer(keras.Sequential):
    """Its step uses another optimizer, which the first step builds."""

    def __init__(self, layers):
        super().__init__(layers)
        self.step_optimizer = keras.optimizers.Adam(0.01)

    def train_step(self, data):
        x, y = data
        variables = self.trainable_variables
        loss, gradients = ks.value_and_grad(
            lambda: ops.mean(compare_rows(y, self(x))), variables
        )()
        self.step_optimizer.apply(gradients, variables)
        return {"loss": loss}


class NoCall(keras.Model):
    """A model that only its step can build, as a GAN of two models is."""

    def __init__(self):
        super().__init__()
        self.body, self.step_optimizer = dense(), keras.optimizers.Adam(0.01)
        # On torch, Keras trains no model that is not built.
        self.built = BACKEND == "torch"

    def train_step(self, data):
        x, y = data
        variables = self.body.trainable_variables
        loss, gradients = ks.value_and_grad(
            lambda: ops.mean(compare_rows(y, self.body(x))), variables
        )()
        self.step_optimizer.apply(gradients, variables)
        return {"loss": loss}


class PythonMetric(keras.metrics.Metric):
    """Keeps a list of means."""

    def __init__(self):
        super().__init__(name="python")
        self.means = []

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.means.append(ops.mean(ops.abs(y_true - y_pred)))

    def result(self):
        return sum(self.means) / max(len(self.means), 1)

    def reset_state(self):
        self.means = []


class DividedLoss(keras.Sequential):
    """Divides its loss by the number of replicas, as models for tf.distribute do."""

    strategy = None

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **kwargs):
        loss = ops.mean(ops.square(y - y_pred))
        return loss / self.strategy.num_replicas_in_sync


def divided_loss():
    model = dense(DividedLoss)
    model.strategy = ks.get_strategy()
    return models.compiled(model)


class MeanOfReplicas(layers.Layer):
    """Subtracts the mean of the replicas' means, some of fewer rows."""

    def __init__(self):
        super().__init__()
        self.strategy = ks.get_strategy()

    def call(self, x):
        mean = ops.mean(x, axis=0, keepdims=True)
        total = ks.get_replica_context().all_reduce("SUM", mean)
        return x - total / self.strategy.num_replicas_in_sync


def dense(cls=keras.Sequential):
    return cls([keras.Input((4,)), layers.Dense(3, "tanh"), layers.Dense(1)])


def accumulating():
    # Adam would change weights in the steps that apply gradients of zero.
    return models.compiled(dense(Accumulating).make_state(), keras.optimizers.SGD(0.1))


def no_call():
    model = NoCall()
    model.compile("sgd")
    return model


def with_layer(make):
    return lambda: models.compiled(models.mlp(make))


def with_loss(loss):
    return lambda: models.compiled(loss=loss)


@dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
        make: Returns a compiled model.
        kinds: The kinds of its steps that run whole, in words.
        options: Arguments of `conformance.compare.train`.
        is_traceable: False for Python state and control flow, which JAX cannot trace,
            and for a custom `train_step`, which is another function there.
        is_eager: False if Keras on TensorFlow cannot train it without compilation.
        gathers: True if it need not run whole, once a part of it gathers its rows.
    """

    make: Callable[[], keras.Model]
    kinds: str = "train"
    options: dict[str, Any] = field(default_factory=dict)
    is_traceable: bool = True
    is_eager: bool = True
    gathers: bool = False

    @property
    def whole_kinds(self) -> set[str]:
        """The kinds of steps that run whole on this backend."""
        return set() if BACKEND == "jax" else set(self.kinds.split())

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments of `train`: `predict` is called if it runs whole."""
        predicted = 8 if "predict" in self.kinds else 0
        return {"x": X, "y": Y, "predicted": predicted, **self.options}


BOTH = "train predict"
PROGRAMS = {
    "functional ops": Program(functional_ops, BOTH, gathers=True),
    "activation": Program(
        with_layer(lambda: layers.Dense(3, lambda x: x / ops.max(ops.abs(x)))),
        BOTH,
        gathers=True,
    ),
    "partial as activation": Program(
        with_layer(
            lambda: layers.Dense(3, functools.partial(subtract_mean, factor=0.5))
        ),
        BOTH,
        gathers=True,
    ),
    "softmax over rows": Program(
        with_layer(lambda: layers.Softmax(axis=-2)), BOTH, gathers=True
    ),
    "cosine over rows": Program(with_loss(keras.losses.CosineSimilarity(axis=0))),
    "unused layer": Program(lambda: models.compiled(UnusedLayer()), BOTH),
    "group deviation": Program(with_layer(GroupDeviation), BOTH),
    "halves": Program(lambda: models.compiled(dense(Halves))),
    "hardest rows": Program(lambda: models.compiled(dense(HardestRows))),
    "pairs": Program(pairs, BOTH, {"y": PAIR_LABELS, "shuffle": False}),
    "partial as loss": Program(with_loss(functools.partial(compare_rows, factor=0.5))),
    "method as loss": Program(with_loss(HasMethod().loss), gathers=True),
    "wraps as loss": Program(with_loss(wrapped), gathers=True),
    "slots as loss": Program(with_loss(HasSlots()), gathers=True),
    "host random": Program(
        lambda: models.compiled(models.mlp(HostRandom), run_eagerly=True),
        is_traceable=False,
    ),
    "rare branch": Program(rare_branch, options={"shuffle": False}, is_traceable=False),
    "float8": Program(
        float8, options={"x": WIDE, "y": WIDE[:, ::-1].copy()}, is_eager=False
    ),
    "centers": Program(with_layer(Centers)),
    "data-dependent shift": Program(with_layer(DataDependentShift)),
    "divided loss": Program(divided_loss),
    "mean of replicas": Program(with_layer(MeanOfReplicas), BOTH, gathers=True),
    "accumulator": Program(accumulating, is_traceable=False),
    "step optimizer": Program(
        lambda: models.compiled(dense(StepOptimizer), keras.optimizers.SGD(0.1)),
        is_traceable=False,
    ),
    "no call": Program(no_call, is_traceable=False),
    "python metric": Program(
        lambda: models.compiled(metrics=[PythonMetric()], run_eagerly=True),
        is_traceable=False,
    ),
}
