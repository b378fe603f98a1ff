"""Logs that a step computes of its metrics' results equal one device's."""

import pkgutil

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategy as ks
from conformance import models
from conformance.compare import assert_equal, scope, train
from tests.training.shared import alone

BACKEND = keras.backend.backend()
REPLICAS = {
    "torch": "keras_strategy.backends.torch.replica:TorchReplica",
    "tensorflow": "keras_strategy.backends.tensorflow.replica:TensorFlowReplica",
}
X, Y = models.regression(17)
LABELS = (Y > 0).astype("float32")
STEPS = pytest.mark.skipif(
    BACKEND == "jax", reason="a custom step is a pure function there"
)


def count():
    """A metric of a class that was made after the first strategy."""

    class Count(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="count")
            self.rows = self.add_weight(shape=(), initializer="zeros", name="rows")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.rows.assign_add(ops.cast(ops.shape(y_true)[0], "float32"))

        def result(self):
            return self.rows + 0.0

    return Count()


class Derived(keras.Model):
    """Logs what it computes of results, and results under other names."""

    def __init__(self):
        super().__init__()
        self.body = keras.Sequential([layers.Dense(4, "tanh"), layers.Dense(1)])
        self.area = keras.metrics.AUC(name="auc_metric")
        self.error = keras.metrics.MeanAbsoluteError(name="error")
        self.count = count()

    def call(self, x):
        return ops.sigmoid(self.body(x))

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        self.area.update_state(y, y_pred)
        self.error.update_state(y, y_pred)
        self.count.update_state(y, y_pred)
        error = self.error.result()
        # Once more: what was merged before does not count now.
        self.error.update_state(y, 1.0 - y_pred)
        return {
            "auc": self.area.result(),
            "error": error,  # which is the name of a metric that goes on
            "distance": ops.square(self.error.result()) / logs["accuracy"],
            "rows": ops.log(self.count.result()),
        }


@pytest.mark.full(keep_on="jax")
def test_logs_derived_from_results(mirrored):
    def make():
        return models.compiled(
            Derived(), loss="binary_crossentropy", metrics=["accuracy"]
        )

    def fit(strategy):
        validation = X[:11], LABELS[:11]
        return train(strategy, make, X, LABELS, validation_data=validation, predicted=0)

    one = fit(None)
    assert_equal(one, fit(mirrored(3)))


class OwnStep(Derived):
    """As Keras's guide to custom training steps writes them."""

    def train_step(self, data):
        x, y = data

        def loss_of():
            y_pred = self(x, training=True)
            return self.compute_loss(y=y, y_pred=y_pred), y_pred

        variables = self.trainable_variables
        (loss, y_pred), gradients = ks.value_and_grad(
            loss_of, variables, has_aux=True
        )()
        self.optimizer.apply(gradients, variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        logs = {m.name: m.result() for m in self.metrics if m is not self.count}
        logs.update(logs.pop("compile_metrics"))
        # `self.area` was made after Keras's own, and is not of them.
        return {**logs, "half": 0.5 * logs["auc_metric"], "this batch": self.area(y, y)}


@pytest.mark.full(keep_on="torch")
@pytest.mark.needs_patch("Metric.result", backend="torch")
@STEPS
def test_custom_step_logs(two):
    def make():
        model = models.compiled(
            OwnStep(), loss="binary_crossentropy", metrics=["accuracy", "mse"]
        )
        model(X[:1])
        model.optimizer.build(model.trainable_variables)
        return model

    one = alone(make, X, LABELS, predicted=0)
    assert_equal(one, train(two, make, X, LABELS, predicted=0))


def test_unmerged_result_is_reported(two):
    """The metric's variable does not define its result over the replicas."""

    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.largest = self.add_variable(
                (), "zeros", aggregation="none", name="value"
            )

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.largest.assign(ops.maximum(self.largest, ops.max(y_true)))

        def result(self):
            return self.largest + 0.0

    def fit(strategy):
        return train(strategy, lambda: models.compiled(metrics=[Largest()]), X, Y)

    if BACKEND == "jax":
        assert_equal(fit(None), fit(two))
        return
    with pytest.raises(ValueError, match="largest/value.*only_first_replica"):
        fit(two)


@pytest.mark.needs_patch("Model.get_metrics_result", backend="tensorflow")
@STEPS
def test_unread_metrics_need_no_reduction(two, monkeypatch):
    """The logs of Keras's own step are merged outside of it, where they are read."""
    reduced = []

    def weighted_sum(self, tensors, weight):
        reduced.append(len(tensors))
        return original(self, tensors, weight)

    with scope(two):
        model = models.compiled(metrics=["mae", "mse"])
    cls = pkgutil.resolve_name(REPLICAS[BACKEND])
    original = cls.weighted_sum
    monkeypatch.setattr(cls, "weighted_sum", weighted_sum)
    model.fit(X, Y, batch_size=8, verbose=0)
    assert set(reduced) == {len(model.trainable_variables)}


def test_epoch_metrics(two):
    with scope(two):
        model = models.compiled(metrics=["mae"])
    logs = model.fit(X, Y, batch_size=8, verbose=0).history
    assert np.isclose(logs["mae"][0], float(model.get_metrics_result()["mae"]))
