"""Model with a training step of the user's, written once for the three backends.

A subclass computes a loss in `loss_of`. Its `train_step` is the one of keras.io's
guides on custom training steps, for the backend in use. A loop by hand calls the same
methods, with the system's wrapper in the place of the model.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import keras

Forward = Callable[..., Any]


class StepModel(keras.Model):
    """Keras model whose loss, and what follows the update, are the user's."""

    def loss_of(
        self, forward: Forward, x: Any, y: Any, sample_weight: Any
    ) -> tuple[Any, Any]:
        """Return the loss of a batch and the predictions.

        Args:
            forward: The model, or the wrapper that a system puts around it.
            x: The inputs of a batch.
            y: The targets.
            sample_weight: The weights of the rows, or None.
        """
        y_pred = forward(x, training=True)
        loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight)
        return loss, y_pred

    def change_gradients(self, gradients: list[Any]) -> list[Any]:
        """Return the gradients for the optimizer, such as clipped ones."""
        return gradients

    def after_update(self) -> None:
        """Assign what follows the new weights."""

    def log(self, loss: Any, y: Any, y_pred: Any, sample_weight: Any) -> dict[str, Any]:
        """Update the metrics and return the results."""
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            elif y is not None:
                metric.update_state(y, y_pred, sample_weight=sample_weight)
        return self.get_metrics_result()

    def train_step(self, *arguments: Any) -> Any:
        """Run the step of the backend's guide."""
        step = _jax_step if keras.backend.backend() == "jax" else _eager_step
        return step(self, *arguments)


def gradients_of(model: keras.Model, loss_of: Callable, variables: Any = None) -> Any:
    """Return a loss, further results and gradients, as the backend's guide does."""
    variables = model.trainable_variables if variables is None else variables
    if keras.backend.backend() == "torch":
        model.zero_grad()
        loss, beside = loss_of()
        loss.backward()
        return loss, beside, [v.value.grad for v in variables]
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss, beside = loss_of()
    return loss, beside, tape.gradient(loss, variables)


def _eager_step(model: StepModel, data: Any) -> dict[str, Any]:
    x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
    loss, y_pred, gradients = gradients_of(
        model, lambda: model.loss_of(model, x, y, weight)
    )
    with _no_grad():
        gradients = model.change_gradients(gradients)
        model.optimizer.apply(gradients, model.trainable_weights)
        model.after_update()
    return model.log(loss, y, y_pred, weight)


def _no_grad() -> contextlib.AbstractContextManager[Any]:
    if keras.backend.backend() != "torch":
        return contextlib.nullcontext()
    import torch

    return torch.no_grad()


def _jax_step(model: StepModel, state: Any, data: Any) -> tuple[dict[str, Any], Any]:
    import jax

    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    trainable, non_trainable, optimizer, metrics = state

    def scope(trainable: Any, non_trainable: Any, metrics: Any) -> keras.StatelessScope:
        variables = (
            *zip(model.trainable_variables, trainable, strict=True),
            *zip(model.non_trainable_variables, non_trainable, strict=True),
            *zip(model.metrics_variables, metrics, strict=True),
        )
        return keras.StatelessScope(variables, collect_losses=True)

    def values(variables: Any, current: keras.StatelessScope) -> list[Any]:
        return [current.get_current_value(v) for v in variables]

    def loss_and_state(trainable: Any, non_trainable: Any) -> tuple[Any, Any]:
        with scope(trainable, non_trainable, metrics) as current:
            loss, y_pred = model.loss_of(model, x, y, sample_weight)
        return loss, (y_pred, values(model.non_trainable_variables, current))

    gradient = jax.value_and_grad(loss_and_state, has_aux=True)
    (loss, (y_pred, non_trainable)), gradients = gradient(trainable, non_trainable)
    gradients = model.change_gradients(gradients)
    trainable, optimizer = model.optimizer.stateless_apply(
        optimizer, gradients, trainable
    )
    with scope(trainable, non_trainable, metrics) as current:
        model.after_update()
        logs = model.log(loss, y, y_pred, sample_weight)
    non_trainable = values(model.non_trainable_variables, current)
    metrics = values(model.metrics_variables, current)
    return logs, (trainable, non_trainable, optimizer, metrics)
