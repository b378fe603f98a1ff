"""Guides of keras.io: custom steps and loops."""

import keras
import numpy as np
from keras import layers

import keras_strategy as ks
from conformance.ports.port import (
    BACKEND,
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
    vectors,
)
from conformance.step_model import gradients_of

GUIDES = "keras-team/keras-io: guides"


class FirstExample(keras.Model):
    """Loss and metrics of `compile`, with sample weights, in custom steps."""

    def _logged(self, loss, y, y_pred, sample_weight):
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred, sample_weight=sample_weight)
        return {m.name: m.result() for m in self.metrics}

    def _loss(self, x, y, sample_weight, training):
        y_pred = self(x, training=training)
        loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
        return loss, y_pred

    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        loss, y_pred, gradients = gradients_of(
            self, lambda: self._loss(x, y, weight, True)
        )
        self.optimizer.apply(gradients, self.trainable_variables)
        return self._logged(loss, y, y_pred, weight)

    def test_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        loss, y_pred = self._loss(x, y, weight, False)
        return self._logged(loss, y, y_pred, weight)


class OwnMetrics(keras.Model):
    """Model with its own loss and metrics."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_fn = keras.losses.MeanSquaredError()

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae_metric]


class LowerLevel(OwnMetrics):
    def train_step(self, data):
        x, y = data

        def loss_of():
            y_pred = self(x, training=True)
            return self.loss_fn(y, y_pred), y_pred

        loss, y_pred, gradients = gradients_of(self, loss_of)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.loss_tracker.update_state(loss)
        self.mae_metric.update_state(y, y_pred)
        return {"loss": self.loss_tracker.result(), "mae": self.mae_metric.result()}


class PureSteps:
    """Train as the guide for JAX does: steps are functions of state."""

    def compute_loss_and_updates(
        self, trainable, non_trainable, metrics, x, y, weight, training=False
    ):
        y_pred, non_trainable = self.stateless_call(
            trainable, non_trainable, x, training=training
        )
        loss, (trainable, non_trainable, metrics) = self.stateless_compute_loss(
            trainable,
            non_trainable,
            metrics,
            x=x,
            y=y,
            y_pred=y_pred,
            sample_weight=weight,
            training=training,
        )
        return loss, (y_pred, non_trainable, metrics)

    def _updated(self, variables, loss, y, y_pred, weight):
        updated, logs = [], {}
        for metric in self.metrics:
            own = variables[len(updated) : len(updated) + len(metric.variables)]
            if metric.name == "loss":
                own = metric.stateless_update_state(own, loss)
            else:
                own = metric.stateless_update_state(
                    own, y, y_pred, sample_weight=weight
                )
            logs[metric.name] = metric.stateless_result(own)
            updated += own
        return logs, updated

    def train_step(self, state, data):
        import jax

        trainable, non_trainable, optimizer, metrics = state
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        grad_fn = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (loss, (y_pred, non_trainable, metrics)), grads = grad_fn(
            trainable, non_trainable, metrics, x, y, weight, training=True
        )
        trainable, optimizer = self.optimizer.stateless_apply(
            optimizer, grads, trainable
        )
        logs, metrics = self._updated(metrics, loss, y, y_pred, weight)
        return logs, (trainable, non_trainable, optimizer, metrics)

    def test_step(self, state, data):
        trainable, non_trainable, metrics = state
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        loss, (y_pred, non_trainable, metrics) = self.compute_loss_and_updates(
            trainable, non_trainable, metrics, x, y, weight
        )
        logs, metrics = self._updated(metrics, loss, y, y_pred, weight)
        return logs, (trainable, non_trainable, metrics)


class PureExample(PureSteps, keras.Model):
    pass


class PureLowerLevel(PureSteps, OwnMetrics):
    def compute_loss_and_updates(
        self, trainable, non_trainable, metrics, x, y, weight, training=False
    ):
        y_pred, non_trainable = self.stateless_call(
            trainable, non_trainable, x, training=training
        )
        return self.loss_fn(y, y_pred), (y_pred, non_trainable, metrics)


def functional(cls, **compile):
    def make():
        inputs = keras.Input((4,))
        hidden = layers.Dense(8, "tanh")(inputs)
        return compiled(cls(inputs, layers.Dense(1)(hidden)), "adam", **compile)

    return make


ANY_STEPS = f"{GUIDES}/custom_train_step_in_*.py"


first_example = functional(
    PureExample if BACKEND == "jax" else FirstExample, loss="mse", metrics=["mae"]
)


@port(ANY_STEPS)
def custom_train_step(strategy):
    return stepped(strategy, first_example, X, Y, validation_data=(X[:11], Y[:11]))


@port(ANY_STEPS)
def custom_train_step_with_sample_weight(strategy):
    weight = np.abs(vectors(ROWS, 4, 1, 1)[-1])
    return stepped(strategy, first_example, X, Y, sample_weight=weight)


@port(ANY_STEPS)
def custom_train_step_lower_level(strategy):
    cls = PureLowerLevel if BACKEND == "jax" else LowerLevel
    return fitted(strategy, functional(cls), X, Y)


@port(f"{GUIDES}/writing_a_custom_training_loop_in_*.py")
def custom_training_loop(strategy):
    """Each batch goes to the replicas by `run`; what the loop did is in the step."""
    keras.utils.set_random_seed(1)
    strategy = strategy or ks.OneDeviceStrategy("cpu:0")
    n = strategy.num_replicas_in_sync
    labels = np.arange(ROWS) % 3
    with strategy.scope():
        model = dense(4, 3)
        optimizer = keras.optimizers.Adam(1e-2)
        optimizer.build(model.trainable_variables)
        train_acc_metric = keras.metrics.SparseCategoricalAccuracy()

    def train_step(x, y):
        def loss_of():
            logits = model(x, training=True)
            return LOGITS_LOSS(y, logits), logits

        if BACKEND == "jax":
            (loss, logits), gradients = ks.value_and_grad(
                loss_of, model.trainable_variables, has_aux=True
            )()
        else:
            loss, logits, gradients = gradients_of(model, loss_of)
        optimizer.apply(gradients, model.trainable_variables)
        train_acc_metric.update_state(y, logits)
        return loss

    logs = []
    for _ in range(2):
        for begin in range(0, ROWS, 8):
            x, y = (
                strategy.experimental_distribute_values_from_function(
                    lambda context, a=a: np.array_split(a, n)[
                        context.replica_id_in_sync_group
                    ]
                )
                for a in (X[begin : begin + 8], labels[begin : begin + 8])
            )
            loss = strategy.run(train_step, args=(x, y))
            logs.append(float(strategy.reduce("SUM", loss)))
        logs.append(float(train_acc_metric.result()))
        train_acc_metric.reset_state()
    weights = [v.numpy() for v in [*model.variables, *optimizer.variables]]
    return Outcome(weights, logs, [model.predict(X, batch_size=8, verbose=0)])
