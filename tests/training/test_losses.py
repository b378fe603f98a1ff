"""Losses and their weights in custom loops, as in tf.nn and beyond."""

import contextlib

import keras
import numpy as np
import pytest

import keras_strategy as ks
from conformance.compare import largest, scope

LOSSES = np.float32([[1.0, 2.0], [3.0, 5.0]])
WEIGHTS = np.float32([1.0, 0.5])


def number(value):
    return keras.ops.convert_to_numpy(value).tolist()


@pytest.mark.parametrize(
    ("weights", "size", "expected"),
    [(None, None, 5.5), (None, 4, 2.75), (WEIGHTS, None, 3.5), (WEIGHTS, 7, 1.0)],
)
def test_compute_average_loss(weights, size, expected):
    assert number(ks.compute_average_loss(LOSSES, weights, size)) == expected
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        native = tf.nn.compute_average_loss(LOSSES, weights, size)
        assert native.numpy() == expected


def test_compute_average_loss_on_replicas(two):
    per_replica = two.run(lambda: ks.compute_average_loss(LOSSES))
    assert number(two.reduce("SUM", per_replica)) == 5.5


def functions():
    if keras.backend.backend() != "tensorflow":
        return ks
    import tensorflow as tf

    return tf.nn


def test_uneven_replicas(two):
    losses = ks.PerReplica([np.float32([1.0, 2.0, 3.0]), np.float32([6.0])])
    average = functions().compute_average_loss
    per_replica = two.run(lambda x: average(x), args=(losses,))
    assert number(two.reduce("SUM", per_replica)) == 3.0


class OwnLoss(keras.Model):
    """A step as tf.distribute's loops have them."""

    def __init__(self, functions, size):
        super().__init__()
        self.functions, self.size = functions, size
        self.dense = keras.layers.Dense(1, kernel_regularizer="l2")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data

        def loss_of():
            errors = keras.ops.square(self(x)[:, 0] - y)
            loss = self.functions.compute_average_loss(
                errors, global_batch_size=self.size
            )
            return loss + self.functions.scale_regularization_loss(self.losses[0])

        loss, gradients = ks.value_and_grad(loss_of, self.trainable_variables)()
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@pytest.mark.full(keep_on="tensorflow")
@pytest.mark.needs_patch(
    "tensorflow._api.v2.nn.compute_average_loss",
    "tensorflow._api.v2.nn.scale_regularization_loss",
    backend="tensorflow",
    case="8",
)
@pytest.mark.skipif(
    keras.backend.backend() == "jax",
    reason="a custom step is a pure function there",
)
@pytest.mark.parametrize("size", [None, 8])
def test_compute_average_loss_in_fit(size, two):
    x, y = np.random.RandomState(1).rand(2, 17, 1).astype("float32")

    def trained(strategy):
        keras.utils.set_random_seed(1)
        with scope(strategy):
            model = OwnLoss(functions(), size)
            model.compile("sgd")
        logs = model.fit(x, y[:, 0], batch_size=8, verbose=0).history
        return [*model.get_weights(), logs["loss"]]

    assert largest(trained(None), trained(two)) < 1e-5


def test_compute_average_loss_refuses_bad_arguments():
    with pytest.raises(ValueError, match="per_example_loss"):
        ks.compute_average_loss(np.float32(3.0))
    with pytest.raises(ValueError, match="global_batch_size"):
        ks.compute_average_loss(LOSSES, global_batch_size=np.array([4]))


def test_scale_regularization_loss(two):
    scaled = two.run(lambda: ks.scale_regularization_loss([1.0, 2.0]))
    assert number(two.reduce("SUM", scaled)) == 3.0
    assert number(ks.scale_regularization_loss(np.float32([1.0, 4.0]))) == 5.0
    assert number(ks.scale_regularization_loss([])) == 0.0
    with two.scope(), pytest.raises(RuntimeError, match="strategy.run"):
        ks.scale_regularization_loss([1.0])


@pytest.mark.full(keep_on="torch")
def test_weight_by_rows_weights_local_means(two):
    """The last batches split unevenly, and leave a replica without rows."""
    x, y = np.random.RandomState(1).rand(2, 12, 1).astype("float32")
    batches = [(x[i:j], y[i:j]) for i, j in [(0, 4), (4, 8), (8, 11), (11, 12)]]

    def trained(strategy, loss, weight):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
            optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
            optimizer.build(model.trainable_variables)

        def step(x, y):
            variables = model.trainable_variables
            _, gradients = ks.value_and_grad(lambda: loss(y, model(x)), variables)()
            with weight(keras.ops.shape(x)[0]):
                optimizer.apply(gradients, variables)

        for batch in strategy.experimental_distribute_dataset(batches):
            strategy.run(step, args=batch)
        return model.get_weights()

    def mean(y, outputs):
        return keras.ops.mean(keras.ops.square(y - outputs))

    def nothing(rows):
        return contextlib.nullcontext()

    expected = trained(ks.OneDeviceStrategy("cpu:0"), mean, nothing)
    assert largest(expected, trained(two, mean, ks.weight_by_rows)) < 2e-5
    assert largest(expected, trained(two, mean, nothing)) > 1e-3
    keras_mean = keras.losses.MeanSquaredError()  # which counts the rows of all
    assert largest(expected, trained(two, keras_mean, nothing)) < 2e-5


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="a step is one program")
def test_replica_without_rows_computes_one(mirrored):
    """Some metrics and kernels do not accept a batch of 0 rows."""
    strategy, seen = mirrored(3), []

    class Counting(keras.layers.Layer):
        def call(self, inputs):
            seen.append(inputs.shape[0])
            return inputs

    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1), Counting()])
        model.compile("sgd", "mse", run_eagerly=True)
    x = np.ones((7, 1), "float32")
    model.fit(x, x, batch_size=6, verbose=0)  # 2 rows for each replica, then 1 in all
    assert set(seen) >= {1, 2} and 0 not in seen


def test_weight_by_rows_refuses_bad_arguments(two):
    for rows in (2.0, True, [2], None):
        with pytest.raises(ValueError, match="rows="), ks.weight_by_rows(rows):
            pass


class CentredLoss(keras.losses.Loss):
    """A scalar of all rows, which keeps a moving average of the predictions."""

    def __init__(self):
        super().__init__()
        self.calls = keras.Variable(0.0, trainable=False)
        self.center = keras.Variable([0.0, 0.0], trainable=False)

    def call(self, y_true, y_pred):
        self.calls.assign_add(1.0)
        self.center.assign(0.5 * self.center + 0.5 * keras.ops.mean(y_pred, axis=0))
        return keras.ops.mean(keras.ops.square(y_pred - y_true - self.center))


def test_scalar_loss_with_state_is_called_once(two):
    x, y = np.random.RandomState(1).rand(2, 17, 2).astype("float32")

    def trained(strategy):
        keras.utils.set_random_seed(1)
        with scope(strategy):
            loss = CentredLoss()
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
            model.compile("sgd", loss)
        logs = model.fit(x, y, batch_size=8, epochs=2, verbose=0).history
        return [*model.get_weights(), logs["loss"], loss.calls, loss.center]

    assert largest(trained(None), trained(two)) < 1e-5
