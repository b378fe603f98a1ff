"""Loop by hand for a compiled Keras model on torch, which wrappers share.

It has the steps of https://keras.io/guides/writing_a_custom_training_loop_in_torch/ and
https://keras.io/guides/custom_train_step_in_torch/, with Keras's loss and optimizer.
"""

from collections.abc import Callable
from typing import Any

import keras
import torch

from conformance.program import Program
from conformance.step_model import StepModel
from conformance.systems.training import NotApplicable, Outcome


class Rows(torch.utils.data.Dataset):
    """Data set of a program's rows: inputs, targets and sample weights."""

    def __init__(self, program: Program) -> None:
        data = program.data(program.rows)
        weight = data.sample_weight
        if program.class_weight:
            weight = keras.ops.take(list(program.class_weight.values()), data.y)
        parts = (data.x, data.y) if weight is None else (data.x, data.y, weight)
        self.parts = keras.tree.map_structure(torch.as_tensor, parts)

    def __len__(self) -> int:
        return len(keras.tree.flatten(self.parts)[0])

    def __getitem__(self, row: int) -> Any:
        return keras.tree.map_structure(lambda part: part[row], self.parts)


def check(program: Program) -> None:
    """Raise NotApplicable if a loop by hand cannot run the program as it is."""
    if program.needs_fit:
        raise NotApplicable(program.needs_fit)


def train(
    program: Program,
    model: keras.Model,
    forward: Callable[..., Any],
    batches: Any,
    backward: Callable[[torch.Tensor], None],
    add_up: Callable[[torch.Tensor], torch.Tensor],
    gather: Callable[[Any], Any] | None = None,
) -> Outcome:
    """Train in a loop, with the system's wrapper, data loader and `backward`.

    `gather` returns the loss, batch and predictions of all replicas. Without it, and
    for losses of single outputs, `add_up` sums the replicas' metrics after an epoch.
    """
    initial, logs = model.get_weights(), {}
    custom = isinstance(model, StepModel)
    for epoch in range(program.epochs):
        model.reset_metrics()
        for batch in batches:
            x, y, weight = keras.utils.unpack_x_y_sample_weight(tuple(batch))
            model.zero_grad()
            if custom:
                loss, y_pred = model.loss_of(forward, x, y, weight)
            else:
                y_pred = forward(x, training=True)
                loss = model.compute_loss(x, y, y_pred, weight)
            backward(model.optimizer.scale_loss(loss))
            variables = model.trainable_weights
            gradients = [v.value.grad for v in variables]
            with torch.no_grad():
                if custom:
                    gradients = model.change_gradients(gradients)
                model.optimizer.apply(gradients, variables)
                if custom:
                    model.after_update()
                found = loss.detach(), x, y, y_pred, weight
                log(model, *(gather(found) if gather else found))
        for metric in model.metrics:
            if gather is None or metric.name.endswith("_loss"):
                for variable in metric.variables:
                    variable.assign(add_up(variable.value.detach().clone()))
        results = model.get_metrics_result()
        if program.validation:
            data = program.data(program.validation)
            how = {"batch_size": program.batch_size, "verbose": 0, "return_dict": True}
            found = model.evaluate(data.x, data.y, **how)
            results |= {f"val_{key}": value for key, value in found.items()}
        logs |= {f"{key}, epoch {epoch}": float(v) for key, v in results.items()}
    return Outcome(initial, model.get_weights(), logs)


def log(model: keras.Model, loss: Any, x: Any, y: Any, y_pred: Any, weight: Any):
    """Update the metrics of a compiled model, as Keras's own step does."""
    if isinstance(model, StepModel):
        return model.log(loss, y, y_pred, weight)
    (loss_metric,) = (m for m in model.metrics if m.name == "loss")
    loss_metric.update_state(loss, sample_weight=len(keras.tree.flatten(x)[0]))
    return model.compute_metrics(x, y, y_pred, weight)
