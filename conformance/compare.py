"""Training the same model on one device and on several, and comparing all of it."""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

import keras_strategy as ks

WEIGHTS = 2e-5
LOGS = 1e-5


@dataclass
class Trained:
    """All that a training leaves behind.

    Attributes:
        model: The model.
        weights: The values of its variables.
        optimizer: The values of its optimizer's variables.
        logs: Each metric of each epoch.
        predictions: What the model predicts for rows of the training data.
        apart: The largest difference between the replicas' components of a variable.
    """

    model: keras.Model
    weights: list[np.ndarray]
    optimizer: list[np.ndarray]
    logs: dict[str, Any]
    predictions: Any
    apart: float


def scope(strategy: Any) -> AbstractContextManager[Any]:
    """Return the scope of a strategy, or none for one device."""
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def train(
    strategy: Any,
    make: Callable[[], keras.Model],
    x: Any,
    y: Any,
    batch_size: int = 8,
    epochs: int = 2,
    seed: int = 1,
    predicted: int | None = 8,
    eagerly: bool = False,
    **fit: Any,
) -> Trained:
    """Make a compiled model in the scope and train it outside of it.

    Args:
        strategy: Anything that has a `scope()`; None for one device.
        make: Returns a compiled model.
        x, y: Inputs and targets.
        batch_size: Rows of a global batch.
        epochs: How many times the data is gone through.
        seed: Seeds the initial weights and the order of the rows.
        predicted: How many of the rows `predict` is given at the end: as many as fit
            into one batch by default, since more shapes are more programs; all with
            None, or without targets; and with 0 it is not called.
        eagerly: Whether to compile no step, which is half the time of a short training
            on TensorFlow. Models of several outputs are compiled all the same: Keras
            weights what it logs for each of them by rows, but where it traces a step
            it does not know how many these are.
        **fit: Further arguments of `fit`.
    """
    keras.utils.set_random_seed(seed)
    with scope(strategy):
        model = make()
    if eagerly and len(keras.tree.flatten(y)) == 1:
        model.run_eagerly = True
    options = {"batch_size": batch_size, "epochs": epochs, "verbose": 0, **fit}
    logs = {
        f"{key} of epoch {epoch}": value
        for key, values in model.fit(x, y, **options).history.items()
        for epoch, value in enumerate(values)
    }
    # Before predict: on JAX, Keras gives weights away there that averages of an
    # optimizer may share.
    weights = [np.array(w) for w in model.get_weights()]
    optimizer = [np.array(v.numpy()) for v in model.optimizer.variables]
    if predicted is not None and y is not None:
        x = keras.tree.map_structure(lambda array: array[:predicted], x)
    predictions = (
        [] if predicted == 0 else model.predict(x, batch_size=batch_size, verbose=0)
    )
    return Trained(
        model, weights, optimizer, logs, predictions, replicas_apart(strategy, model)
    )


def replicas_apart(strategy: Any, model: keras.Model) -> float:
    """Return the largest difference between replicas in a mirrored variable."""
    if not isinstance(strategy, ks.Strategy) or strategy.num_replicas_in_sync == 1:
        return 0.0
    worst = 0.0
    for variable in [*model.variables, *model.optimizer.variables]:
        if variable.synchronization == "on_read":
            continue
        first, *others = [
            keras.ops.convert_to_numpy(component)
            for component in strategy.experimental_local_results(variable)
        ]
        if np.issubdtype(first.dtype, np.number):
            worst = max(worst, largest([first] * len(others), others))
    return worst


def differences(one: Trained, many: Trained) -> dict[str, float]:
    """Return the largest differences between two trainings, by what differs.

    Raise if a value is not finite or of another shape, or if replicas of `many` differ.
    """
    if one.logs.keys() != many.logs.keys():
        raise ValueError(f"different logs: {set(one.logs) ^ set(many.logs)}")
    if many.apart:
        raise ValueError(f"the replicas' variables differ by {many.apart}")
    return {
        "weights": largest(one.weights, many.weights),
        "optimizer": largest(one.optimizer, many.optimizer),
        "logs": largest(list(one.logs.values()), list(many.logs.values())),
        "predictions": largest(
            keras.tree.flatten(one.predictions), keras.tree.flatten(many.predictions)
        ),
    }


def largest(one: Sequence[Any], many: Sequence[Any]) -> float:
    """Return the largest difference between arrays, all of them finite.

    It is absolute for values up to 1 and relative for larger ones, of which a float32
    has fewer digits after the point.
    """
    worst = 0.0
    for a, b in zip(one, many, strict=True):
        a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
        if a.shape != b.shape:
            raise ValueError(f"different shapes: {a.shape} and {b.shape}")
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise ValueError("a value is not finite")
        if a.size:
            worst = max(worst, float((np.abs(a - b) / np.maximum(1, np.abs(a))).max()))
    return worst


def assert_equal(
    one: Trained,
    many: Trained,
    weights: float = WEIGHTS,
    logs: float = LOGS,
    predictions: float = LOGS,
) -> None:
    """Assert that the trainings differ by at most these tolerances."""
    found = differences(one, many)
    assert max(found["weights"], found["optimizer"]) <= weights, found
    assert found["logs"] <= logs, found
    assert found["predictions"] <= predictions, found
