"""The walk from a model finds the user's code, and all state that it restores."""

import functools
import random
import types
import weakref
from collections import deque

import keras
import numpy as np
import pytest
from keras import ops

import keras_strategy as ks
from keras_strategy.audit.snapshot import Snapshot, find_objects, find_user_code
from tests.equality import models

BACKEND = keras.backend.backend()
X, Y = models.regression(19)


def against_largest(y_true, y_pred, scale=1.0):
    """A loss of rows that compares them."""
    return scale * ops.mean(ops.square(y_true - y_pred), axis=-1) / ops.max(y_pred)


class Owner:
    def compare(self, *args):
        return against_largest(*args)


class Slots:
    __slots__ = ()

    def __call__(self, *args):
        return against_largest(*args)


@functools.wraps(keras.losses.mean_squared_error)
def wrapping(y_true, y_pred):
    return against_largest(y_true, y_pred)


def compile_function(fn):
    """Return an object of the backend that calls a function."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(fn)
    if BACKEND == "jax":
        import jax

        return jax.jit(fn)
    return functools.lru_cache(fn)


FUNCTIONS = {
    "function": against_largest,
    "partial": functools.partial(against_largest, scale=2.0),
    "partial of Keras": functools.partial(keras.losses.cosine_similarity, axis=0),
    "method": Owner().compare,
    "slots": Slots(),
    "wraps": wrapping,
    "compiled": compile_function(against_largest),
    "operation": keras.ops.add,
    "builtin": max,
}
if BACKEND != "jax":  # where it is a closure of Keras's
    FUNCTIONS["gradient"] = keras.ops.custom_gradient(against_largest)


def compiled(*layers, loss="mse", metrics=("mae",), **options):
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
    model.compile("sgd", loss, metrics=list(metrics), **options)
    return model


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_users_function_is_found(function):
    def is_found(model):
        return find_user_code(find_objects([model])) is not None

    assert is_found(compiled(keras.layers.Dense(3, function)))
    for part in {"loss": function}, {"metrics": [function]}:
        model = compiled(**part)
        assert is_found(model)
    wrapped = keras.metrics.MeanMetricWrapper(function)
    mse = keras.metrics.mean_squared_error
    nested = keras.metrics.MeanMetricWrapper(mse, inner=[(function,)])
    for metric in wrapped, nested:
        assert is_found(compiled(metrics=[metric]))


def matrices(*layers):
    model = keras.Sequential([keras.Input((3, 4)), *layers])
    model.compile("sgd", keras.losses.CategoricalCrossentropy())
    return model


def sequence():
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            keras.layers.Embedding(7, 4),
            keras.layers.Bidirectional(keras.layers.LSTM(3, return_sequences=True)),
            keras.layers.LayerNormalization(),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(2, "softmax"),
        ]
    )


KNOWN = {
    "functions": lambda: compiled(keras.layers.Dense(3, "relu"), metrics=["auc"]),
    "objects": lambda: compiled(loss=keras.losses.CosineSimilarity()),
    "steps": sequence,
    "axis of steps": lambda: matrices(keras.layers.Softmax(axis=-2)),
    "application": lambda: keras.applications.MobileNetV2(
        weights=None, input_shape=(32, 32, 3), alpha=0.35
    ),
}
COMPARING = {
    "outputs": lambda: compiled(keras.layers.Dense(3, activity_regularizer="l2")),
    "axis": lambda: compiled(keras.layers.Softmax(axis=-2)),
    "axes": lambda: matrices(keras.layers.Softmax(axis=(-3, -1))),
    "loss": lambda: compiled(loss=keras.losses.CosineSimilarity(axis=0)),
    "loss, negative": lambda: compiled(loss=keras.losses.CosineSimilarity(axis=-2)),
}


@pytest.mark.parametrize("make", KNOWN.values(), ids=KNOWN)
def test_plain_models_are_known(make):
    assert find_user_code(find_objects([make()])) is None


def test_trained_model_is_known(two):
    with two.scope():
        model = compiled(keras.layers.Dense(3, "tanh"))
    model.fit(X[:8], Y[:8], verbose=0)
    model.evaluate(X[:8], Y[:8], verbose=0)
    model.predict(X[:8], verbose=0)
    assert find_user_code(find_objects([model])) is None


@pytest.mark.parametrize("make", COMPARING.values(), ids=COMPARING)
def test_axis_of_rows_is_found(make):
    assert find_user_code(find_objects([make()])) is not None


def test_overwritten_variables_are_found():
    model = compiled()
    model.quantize("float8")
    assert find_user_code(find_objects([model])) is not None


def raise_error(self):
    raise RuntimeError


def make_raising(name, **attributes):
    """Return an object whose attribute raises."""
    return type("Raising", (), {name: property(raise_error), **attributes})()


class Callable(Owner):
    __call__ = Owner.compare


def test_attributes_that_raise(two):
    with two.scope():
        model = compiled(keras.layers.Dense(3, lambda x: x))
    owner, function = Owner(), Callable()
    model.layers[0].proxies = [weakref.proxy(owner), weakref.proxy(function)]
    model.proxy = weakref.proxy(owner)
    del owner, function
    names = "__dict__", "__class__", "__globals__", "shape"
    # Keras refuses some of them as attributes.
    vars(model)["objects"] = [
        make_raising(name, **attributes)
        for name in names
        for attributes in ({}, {"__slots__": ()}, {"__call__": Owner.compare})
    ]
    assert find_user_code(find_objects([model])) is not None
    Snapshot(two, [model]).restore()
    model.fit(X[:8], Y[:8], verbose=0)


class Stateful(keras.layers.Layer):
    """Changes all kinds of state in each call."""

    def __init__(self):
        super().__init__()
        self.queue, self.namespace = deque([1], maxlen=5), types.SimpleNamespace(n=0)
        self.random, self.numpy = random.Random(1), np.random.RandomState(1)
        self.generator = np.random.default_rng(1)
        self.draw = functools.partial(np.random.default_rng(2).normal, 0.0)
        self.owner = Owner()
        self.owner.log = deque()
        self.change = self.owner.compare

    def state(self):
        generators = self.random, self.numpy.get_state()[1], self.generator
        return str(
            [
                *(list(self.queue), vars(self.namespace), list(self.owner.log)),
                *(generators[0].getstate(), list(generators[1])),
                *(self.generator.bit_generator.state, self.draw.func.__self__),
                self.draw.func.__self__.bit_generator.state,
            ]
        )

    def call(self, x):
        self.queue.append(2)
        self.namespace.n += 1
        self.namespace.new = 1
        self.owner.log.append(3)
        for draw in self.random.random, self.numpy.rand, self.generator.random:
            draw()
        self.draw()
        return x * 2


@pytest.mark.parametrize("kind", ["train", "predict"])
def test_state_of_the_standard_library_is_restored(kind, two):
    with two.scope():
        layer = Stateful()
        model = compiled(layer)
    model.fit(X[:8], Y[:8], verbose=0)
    before = layer.state()
    ks.verify(model, X, Y, kind=kind)
    assert layer.state() == before and layer.queue.maxlen == 5
    layer(X)
    assert layer.state() != before


def test_snapshot_of_unbuilt_parts(two):
    with two.scope():
        model = keras.Sequential([keras.layers.Dense(2), keras.layers.LSTM(3)])
        model.compile("adam", "mse", metrics=["mae"])
        model.unused = keras.layers.MultiHeadAttention(2, 3)
    snapshot = Snapshot(two, [model])
    assert len(snapshot.values()) == len(snapshot.variables)
    snapshot.restore()
    assert not model.built
