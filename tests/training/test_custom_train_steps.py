"""Steps of one's own: `train_step`, `test_step` and `predict_step`."""

import keras
import numpy as np
import pytest

from tests.equality.compare import assert_equal, largest, scope, train
from tests.training.shared import alone

RNG = np.random.RandomState(7)
X = RNG.randn(17, 4).astype("float32")
Y = RNG.randn(17, 1).astype("float32")
WEIGHT = RNG.rand(17).astype("float32")
BACKEND = keras.backend.backend()


class Layers(keras.Model):
    """What the models below share: the layers, and a metric of their own."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(5, "tanh", activity_regularizer="l2")
        self.out = keras.layers.Dense(1)
        self.error = keras.metrics.MeanAbsoluteError(name="error")

    def call(self, x, training=False):
        return self.out(self.hidden(x))


class TorchSteps(Layers):
    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        self.zero_grad()
        predicted = self(x, training=True)
        loss = self.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weight)
        loss.backward()
        variables = self.trainable_weights
        gradients = [v.value.grad for v in variables]
        self.optimizer.apply(gradients, variables)
        return self._logged(loss, y, predicted)

    def test_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        predicted = self(x, training=False)
        loss = self.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weight)
        return self._logged(loss, y, predicted)

    def _logged(self, loss, y, predicted):
        self.error.update_state(y, predicted)
        # On torch, Keras 3.13 itself cannot log a loss that has a gradient.
        loss = keras.ops.stop_gradient(loss)
        return {"error": self.error.result(), "own loss": loss}

    def predict_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return {"twice": 2 * self(x, training=False), "x": x}


class TensorFlowSteps(TorchSteps):
    def train_step(self, data):
        import tensorflow as tf

        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weight)
        variables = self.trainable_weights
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply(gradients, variables)
        return self._logged(loss, y, predicted)


class JaxSteps(Layers):
    def _loss(self, trainable, non_trainable, x, y, weight, training):
        predicted, non_trainable, losses = self.stateless_call(
            trainable, non_trainable, x, training=training, return_losses=True
        )
        loss = self.compute_loss(
            x, y, predicted, sample_weight=weight, training=training
        )
        # What layers add is not in the loss here: Keras takes it from their state.
        return loss, (predicted, non_trainable)

    def _logged(self, metrics_variables, loss, y, predicted):
        logs, updated = {"own loss": loss}, []
        for metric in self.metrics:
            count = len(metric.variables)
            own = metrics_variables[len(updated) : len(updated) + count]
            if metric is self.error:
                own = metric.stateless_update_state(own, y, predicted)
                logs["error"] = metric.stateless_result(own)
            updated += own
        return logs, updated

    def train_step(self, state, data):
        import jax

        trainable, non_trainable, optimizer, metrics = state
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        value_and_grad = jax.value_and_grad(self._loss, has_aux=True)
        (loss, (predicted, non_trainable)), gradients = value_and_grad(
            trainable, non_trainable, x, y, weight, True
        )
        trainable, optimizer = self.optimizer.stateless_apply(
            optimizer, gradients, trainable
        )
        logs, metrics = self._logged(metrics, loss, y, predicted)
        return logs, (trainable, non_trainable, optimizer, metrics)

    def test_step(self, state, data):
        trainable, non_trainable, metrics = state
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        loss, (predicted, non_trainable) = self._loss(
            trainable, non_trainable, x, y, weight, False
        )
        logs, metrics = self._logged(metrics, loss, y, predicted)
        return logs, (trainable, non_trainable, metrics)

    def predict_step(self, state, data):
        trainable, non_trainable = state
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        predicted, non_trainable = self.stateless_call(
            trainable, non_trainable, x, training=False
        )
        return {"twice": 2 * predicted, "x": x}, non_trainable


OwnSteps = {"torch": TorchSteps, "tensorflow": TensorFlowSteps, "jax": JaxSteps}[
    BACKEND
]


def own_steps():
    model = OwnSteps()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.1), "mse")
    return model


@pytest.mark.full(keep=1, keep_on="jax")
@pytest.mark.parametrize("weighted", [False, True], ids=["", "sample weights"])
def test_fit(weighted, two):
    options = {"validation_data": (X[:11], Y[:11])}
    if weighted:
        options["sample_weight"] = WEIGHT
    one = alone(own_steps, X, Y, **options)
    many = train(two, own_steps, X, Y, **options)
    keys = {key.split(" of ")[0] for key in one.logs}
    assert keys == {"error", "own loss", "val_error", "val_own loss"}
    assert_equal(one, many)


@pytest.mark.full(keep_on="jax")
def test_evaluate_and_predict(two):
    def use(strategy):
        keras.utils.set_random_seed(1)
        with scope(strategy):
            model = own_steps()
        predicted = model.predict(X, batch_size=8, verbose=0)
        assert set(predicted) == {"twice", "x"}
        np.testing.assert_array_equal(predicted["x"], X)
        logs = model.evaluate(X, Y, batch_size=8, verbose=0, return_dict=True)
        on_batch = [
            model.train_on_batch(X[:7], Y[:7], return_dict=True),
            model.test_on_batch(X[:1], Y[:1], return_dict=True),
            model.predict_on_batch(X[:5]),
        ]
        on_batch = [d[key] for d in on_batch for key in sorted(d)]
        return [predicted["twice"], *logs.values(), *on_batch]

    assert largest(use(None), use(two)) < 1e-5


@pytest.mark.full(keep_on="torch")
def test_step_around_keras_train_step(two):
    """What a `train_step` counts beside `super().train_step` counts once a step."""

    class Counting(Layers):
        def __init__(self):
            super().__init__()
            self.steps = keras.Variable(
                0.0, trainable=False, aggregation="only_first_replica", name="steps"
            )

        def train_step(self, *args):
            if BACKEND == "jax":
                (trainable, non_trainable, *others), data = args
                where = [v is self.steps for v in self.non_trainable_variables]
                logs, (trainable, non_trainable, *others) = super().train_step(
                    (trainable, non_trainable, *others), data
                )
                non_trainable = [
                    value + 1 if here else value
                    for here, value in zip(where, non_trainable, strict=True)
                ]
                return logs, (trainable, non_trainable, *others)
            logs = super().train_step(*args)
            self.steps.assign(self.steps + 1)
            return logs

    def make():
        model = Counting()
        model.compile("adam", "mse")
        return model

    one = alone(make, X, Y, predicted=0)
    many = train(two, make, X, Y, predicted=0)
    assert float(one.model.steps) == float(many.model.steps) == 6
    assert_equal(one, many)


class MasksWords(keras.Model):
    """Its data has no targets: the step makes them, as for masked language models."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(9, 4)
        self.out = keras.layers.Dense(9)
        self.seed = keras.random.SeedGenerator(3)

    def call(self, x):
        return self.out(self.embedding(x))

    def masked(self, x):
        is_masked = keras.random.uniform(keras.ops.shape(x), seed=self.seed) < 0.4
        weight = keras.ops.cast(is_masked, "float32")
        return keras.ops.where(is_masked, 8, x), x, weight

    def train_step(self, data):
        return super().train_step(self.masked(data))

    def test_step(self, data):
        return super().test_step(self.masked(data))


@pytest.mark.skipif(
    BACKEND != "tensorflow", reason="elsewhere one device needs targets"
)
def test_targets_of_a_step_equal_one_device(mirrored):
    def make():
        model = MasksWords()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, weighted_metrics=["accuracy"])
        return model

    words = RNG.randint(0, 8, (17, 6))
    options = {"validation_data": words[:11], "predicted": 0}
    one = train(None, make, words, None, **options)
    assert_equal(one, train(mirrored(3), make, words, None, **options))


class Undecided(keras.Model):
    def call(self, x):
        raise ValueError("not with this data")

    def train_step(self, data):
        return {"loss": keras.ops.mean(self(data[0]))}


def test_error_of_a_call_in_a_step_is_raised(mirrored):
    with scope(mirrored(2)):
        model = Undecided()
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="not with this data"):
        model.fit(X, Y, verbose=0)
