"""keras.io's guides: custom layers, losses and metrics."""

import keras
import numpy as np
from keras import layers, ops

from conformance.compare import scope
from conformance.ports.keras_io_steps import GUIDES
from conformance.ports.port import (
    LOGITS_LOSS,
    ROWS,
    Outcome,
    X,
    Y,
    compiled,
    dense,
    fitted,
    port,
    stepped,
)


class ComputeSum(layers.Layer):
    def __init__(self, **weight):
        super().__init__()
        self.total = self.add_weight(
            shape=(4,), initializer="zeros", trainable=False, **weight
        )

    def call(self, inputs):
        self.total.assign_add(ops.sum(inputs, axis=0))
        return inputs + 0 * self.total


def summing(**weight):
    def make():
        parts = keras.Input((4,)), ComputeSum(**weight), layers.Dense(1)
        return compiled(keras.Sequential(parts), "sgd", "mse")

    return make


LAYERS = f"{GUIDES}/making_new_layers_and_models_via_subclassing.py"


# It counts in `predict` too, which comes after the weights were looked at.
@port(LAYERS)
def compute_sum(strategy):
    return stepped(strategy, summing(), X, Y)


@port(LAYERS)
def compute_sum_with_an_aggregation(strategy):
    return stepped(strategy, summing(aggregation="sum"), X, Y)


class Sampling(layers.Layer):
    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        z_mean, z_log_var = inputs
        epsilon = keras.random.normal(ops.shape(z_mean), seed=self.seed_generator)
        return z_mean + ops.exp(0.5 * z_log_var) * epsilon


class VariationalAutoEncoder(keras.Model):
    """Trained by `fit` with a loss, beside the one that it adds."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(8, "tanh")
        self.mean, self.log_var = layers.Dense(2), layers.Dense(2)
        self.sampling = Sampling()
        self.decoder = keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(4)])

    def call(self, inputs):
        hidden = self.hidden(inputs)
        z_mean, z_log_var = self.mean(hidden), self.log_var(hidden)
        kl_loss = -0.5 * ops.mean(
            z_log_var - ops.square(z_mean) - ops.exp(z_log_var) + 1
        )
        self.add_loss(kl_loss)
        return self.decoder(self.sampling((z_mean, z_log_var)))


@port(LAYERS)
def variational_autoencoder(strategy):
    def make():
        optimizer, loss = keras.optimizers.Adam(1e-2), keras.losses.MeanSquaredError()
        return compiled(VariationalAutoEncoder(), optimizer, loss)

    return fitted(strategy, make, X, X)


class ActivityRegularization(layers.Layer):
    """Adds a sum over all entries, which no mean over rows is."""

    def call(self, inputs):
        self.add_loss(ops.sum(inputs) * 0.1)
        return inputs


class CategoricalTruePositives(keras.metrics.Metric):
    def __init__(self, name="categorical_true_positives", **kwargs):
        super().__init__(name=name, **kwargs)
        self.true_positives = self.add_variable(
            shape=(), name="ctp", initializer="zeros"
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        y_pred = ops.reshape(ops.argmax(y_pred, axis=1), (-1, 1))
        values = ops.cast(y_true, "int32") == ops.cast(y_pred, "int32")
        self.true_positives.assign_add(ops.sum(ops.cast(values, "float32")))

    def result(self):
        return self.true_positives.value


BUILT_IN = f"{GUIDES}/training_with_built_in_methods.py"


@port(BUILT_IN)
def add_loss_of_a_sum(strategy):
    def make():
        hidden, out = layers.Dense(8, "tanh"), layers.Dense(1)
        parts = keras.Input((4,)), hidden, ActivityRegularization(), out
        optimizer = keras.optimizers.RMSprop(1e-3)
        return compiled(keras.Sequential(parts), optimizer, "mse")

    return fitted(strategy, make, X, Y)


@port(BUILT_IN)
def custom_losses_and_metrics(strategy):
    class CustomMSE(keras.losses.Loss):
        def call(self, y_true, y_pred):
            mse = ops.mean(ops.square(y_true - y_pred), axis=-1)
            return mse + 0.1 * ops.mean(ops.square(0.5 - y_pred), axis=-1)

    def make():
        inputs = keras.Input((4,))
        hidden = layers.Dense(8, "tanh")(inputs)
        outputs = {
            "score": layers.Dense(1, name="score")(hidden),
            "class": layers.Dense(3, name="class")(hidden),
        }
        return compiled(
            keras.Model(inputs, outputs),
            keras.optimizers.RMSprop(1e-3),
            loss={"score": CustomMSE(), "class": LOGITS_LOSS},
            metrics={"class": [CategoricalTruePositives()], "score": ["mae"]},
            loss_weights={"score": 2.0, "class": 1.0},
        )

    labels = {"score": Y, "class": np.arange(ROWS)[:, np.newaxis] % 3}
    # Not with validation: on torch, one device then logs that metric's value of it, for
    # what `result` gives is the variable's memory.
    return fitted(strategy, make, X, labels)


class LogisticEndpoint(layers.Layer):
    """Takes the targets as an input, and adds the loss."""

    def __init__(self, name=None):
        super().__init__(name=name)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    def call(self, logits, targets, sample_weight=None):
        self.add_loss(self.loss_fn(targets, logits, sample_weight))
        return ops.sigmoid(logits)


@port(f"{GUIDES.replace('guides', 'examples')}/keras_recipes/endpoint_layer_pattern.py")
def endpoint_layer_pattern(strategy):
    def make():
        inputs = keras.Input((4,), name="inputs")
        targets = keras.Input((1,), name="targets")
        logits = layers.Dense(1)(inputs)
        model = keras.Model([inputs, targets], LogisticEndpoint()(logits, targets))
        return compiled(model, keras.optimizers.Adam(1e-2))

    data = {"inputs": X, "targets": (Y > 0).astype("float32")}
    return fitted(strategy, make, data)


@port(f"{GUIDES}/transfer_learning.py")
def transfer_learning(strategy):
    """Frozen first, then thawed and compiled again."""
    keras.utils.set_random_seed(1)
    logs = []
    with scope(strategy):
        base = dense(4, 3)
        inputs = keras.Input((4,))
        x = layers.Dropout(0.2)(base(inputs, training=False))
        model = keras.Model(inputs, layers.Dense(1)(x))
    for trainable in (False, True):
        base.trainable = trainable
        model.compile(keras.optimizers.Adam(1e-2), "mse")
        history = model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
        logs += list(history.history.values())
    return Outcome(model.get_weights(), logs, [model.predict(X, verbose=0)])
