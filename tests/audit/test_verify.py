"""`verify` and `verify_run` find what differs, name it, and leave no trace."""

import itertools
import random

import keras
import numpy as np
import pytest
from keras import ops

import keras_strategy as ks
from conformance import models
from keras_strategy.audit.comparison import find_metric
from keras_strategy.audit.report import ComparedValue
from keras_strategy.audit.step import StepAudit

BACKEND = keras.backend.backend()
X, Y = models.regression(19)


def halve_largest(x):
    """An activation that compares the rows of the batch."""
    return x / (1 + ops.max(ops.abs(x)))


class Counting(keras.layers.Layer):
    """Counts its calls in Python and in a variable, and draws."""

    def __init__(self):
        super().__init__()
        self.calls, self.seen, self.table = 0, [], {}
        self.seed = keras.random.SeedGenerator(1)
        self.count = self.add_weight(
            shape=(), trainable=False, aggregation="only_first_replica"
        )

    def call(self, x):
        self.calls += 1
        self.seen.append(1)
        self.table["calls"] = self.calls
        self.count.assign(self.count + 1)
        return x + keras.random.normal(ops.shape(x), seed=self.seed)


class Shifting(keras.layers.Layer):
    """Shifts few rows while its weight is above, or exactly, a bound."""

    def __init__(self, compare):
        super().__init__()
        self.compare = compare
        self.weight = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        is_shifted = x.shape[0] in range(1, 6) and self.compare(self.weight)
        return x * self.weight + 0.1 * ops.cast(is_shifted, x.dtype)


def compiled(*layers):
    model = keras.Sequential(
        [keras.Input((4,)), *layers, keras.layers.Dense(1, name="last")]
    )
    model.compile("adam", "mse", metrics=["mae"])
    return model


@pytest.mark.full(keep_on="tensorflow")
def test_equal_step_and_its_table(two):
    with two.scope():
        model = compiled(keras.layers.BatchNormalization(), keras.layers.Dropout(0.5))
    for kind in ("train", "test", "predict"):
        report = ks.verify(model, X, Y, kind=kind)
        assert not report.differs and report.advice == ""
        assert "equals one device's" in str(report)
        assert {"train": "loss", "test": "loss", "predict": "output"}[kind] in {
            value.name for value in report.values
        }


@pytest.mark.parametrize("layer", [keras.layers.MixUp, keras.layers.CutMix])
def test_layer_whose_rows_fit_gathers_is_no_finding(layer, two):
    image = keras.layers.Reshape((2, 2, 1))
    with two.scope():
        model = compiled(image, layer(), keras.layers.Flatten())
    assert not ks.verify(model, X, Y).differs


@pytest.mark.full(keep_on="jax")
def test_metric_with_thresholds_is_no_finding(two):
    metric = keras.metrics.SensitivityAtSpecificity(0.5, num_thresholds=20)
    with two.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, "sigmoid")])
        model.compile("sgd", "binary_crossentropy", weighted_metrics=[metric])
    y = (np.arange(7) % 2).astype("float32")[:, None]
    # With the numbers of some seed, rounding decides which threshold is the first.
    for seed in range(14, 18):
        numbers = np.random.RandomState(seed)
        x, _ = numbers.randn(7, 1).astype("float32"), numbers.rand()
        weights = np.array([1, 2, 3, 3, 2, 1, 7], "float32") / 10
        assert not ks.verify(model, x, y, weights[numbers.permutation(7)]).differs


@pytest.mark.parametrize(
    "compare, lasts", [(lambda w: w == 1.0, False), (lambda w: w > 0.5, True)]
)
def test_difference_that_rounding_removes(compare, lasts, two):
    with two.scope():
        model = compiled(Shifting(compare))
    report = ks.verify(model, X[:7], Y[:7])
    assert report.differs == (lasts and BACKEND != "jax")


@pytest.mark.full(keep_on="torch")
@pytest.mark.parametrize(
    "noise, differs", [(5e-4, True), (1.5e-3, True), (5e-3, False)]
)
def test_rounding_of_half_precision(noise, differs, two, monkeypatch):
    # The comparisons: of replicas and device, of two runs, and of changed weights with
    # these weights and with those of the replicas.
    found = itertools.cycle([2e-2, 0.0, *[noise, 2e-2] * 3])
    monkeypatch.setattr(
        StepAudit,
        "_compare",
        lambda *_: [ComparedValue("gradient", "kernel", next(found), 1e-2)],
    )
    with two.scope():
        model = compiled()
    assert ks.verify(model, X, Y).differs == differs


def test_metric_of_a_log_is_found():
    metrics = [keras.metrics.Mean(name=name) for name in ("error", "my_error", "loss")]
    for log, name in ("my_error", "my_error"), ("out_error", "error"), ("loss", "loss"):
        assert find_metric(metrics, log).name == name
    assert find_metric(metrics, metrics[1].variables[0].path) is metrics[1]
    assert find_metric(metrics, "other") is None


@pytest.mark.skipif(BACKEND != "tensorflow", reason="only TensorFlow has strings")
def test_arrays_of_strings(two):
    words = np.array(["red", "green", "blue"], dtype=object)
    with two.scope():
        lookup = keras.layers.StringLookup(vocabulary=list(words))
        embedding = keras.layers.Embedding(4, 2)
        inputs = keras.Input((), dtype="string")
        model = keras.Sequential([inputs, lookup, embedding, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    for x in words, words.astype("U"):
        assert not ks.verify(model, x, Y[:3]).differs


@pytest.mark.full(keep_on="torch")
@pytest.mark.skipif(BACKEND == "jax", reason="fit has all rows")
@pytest.mark.parametrize("replicas", [2, 3])
def test_place_of_difference(replicas):
    with ks.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]).scope():
        inputs = keras.Input((4,))
        centered = inputs - ops.mean(inputs, axis=0, keepdims=True)
        functional = keras.Model(inputs, keras.layers.Dense(1)(centered))
        functional.compile("sgd", "mse")
        activated = compiled(keras.layers.Dense(3, activation=halve_largest, name="d"))
    report = ks.verify(functional, X, Y)
    assert report.differs and report.cause == "call" and "(Mean)" in report.place
    assert "all_gather" in report.advice and report.place in report.message
    assert ks.verify(activated, X, Y).place == "the layer 'd' (Dense)"
    # Of one row for each replica, too.
    assert ks.verify(activated, X[:replicas], Y[:replicas]).differs


class Balancing(keras.layers.Layer):
    """A layer whose added loss compares rows, as a router's of experts does."""

    def call(self, x):
        self.add_loss(ops.sum(ops.square(ops.mean(ops.tanh(x), axis=0))))
        return x


class Adding(keras.layers.Layer):
    def call(self, x):
        self.add_loss(ops.mean(ops.square(x)))
        return x


@pytest.mark.skipif(BACKEND == "jax", reason="fit has all rows")
def test_layer_that_adds_a_loss_is_named(two):
    with two.scope():
        dense = keras.layers.Dense(3, activity_regularizer="l2")
        fine = compiled(dense, Adding())
        model = compiled(dense, Adding(), Balancing(name="balancing"), Adding())
    assert not ks.verify(fine, X, Y).differs
    report = ks.verify(model, X, Y)
    assert report.place == "`add_loss` of the layer 'balancing' (Balancing)"
    assert "is not a mean" in report.advice


@pytest.mark.full(keep_on="torch")
def test_state_is_restored(two):
    with two.scope():
        layer = Counting()
        model = compiled(layer)
    model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]

    def state():
        arrays = [ops.convert_to_numpy(variable.value) for variable in variables]
        python = layer.calls, list(layer.seen), dict(layer.table)
        generators = random.getstate(), np.random.get_state()[1].tolist()
        return arrays, python, generators

    before = state()
    for kind in ("train", "test", "predict"):
        ks.verify(model, X, Y, kind=kind)
    arrays, *others = state()
    assert others == list(before[1:])
    for ours, expected in zip(arrays, before[0], strict=True):
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.full(keep_on="torch")
def test_run_is_compared(two):
    with two.scope():
        model = compiled()
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
        metric = keras.metrics.Mean(name="error")
        total = keras.Variable(np.zeros((4,), "float32"), name="total")

    def train(reduce, clip=None):
        def step(x, y):
            def loss_fn():
                error = ops.square(y - model(x))[:, 0]
                metric.update_state(error)
                return reduce(error)

            variables = model.trainable_variables
            loss, gradients = ks.value_and_grad(loss_fn, variables)()
            if clip is not None:
                gradients = [ops.clip(g, -clip, clip) for g in gradients]
            optimizer.apply(gradients, variables)
            return loss

        return step

    def assign(x):
        total.assign(total + ops.mean(x, axis=0))

    objects = [model, optimizer, metric]
    weights = model.get_weights()
    good = ks.verify_run(two, train(ks.compute_average_loss), (X, Y), objects=objects)
    assert not good.differs, good
    assert ks.verify_run(two, train(ops.mean), (X, Y), objects=objects).differs
    clipped = train(ks.compute_average_loss, 0.01)
    assert ks.verify_run(two, clipped, (X, Y), objects=objects).differs
    assert "'total" in ks.verify_run(two, assign, (X,)).place
    for ours, expected in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_bad_arguments(two):
    with two.scope():
        model = compiled()
    with pytest.raises(ValueError, match="kind='fit'"):
        ks.verify(model, X, Y, kind="fit")
    with pytest.raises(ValueError, match="at least one row"):
        ks.verify(model, X[:0], Y[:0])
    with pytest.raises(ValueError, match="several replicas of one process"):
        ks.verify(compiled(), X, Y)
    with pytest.raises(ValueError, match="several replicas of one process"):
        ks.verify_run(ks.OneDeviceStrategy("cpu:0"), lambda x: x, (X,))
    with pytest.raises(ValueError, match="fewer rows than 2 replicas"):
        ks.verify_run(two, lambda x: x, (X[:1],))
    with pytest.raises(ValueError, match="mode='loud'"):
        ks.config.audit("loud")
