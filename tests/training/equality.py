"""Training the same model on one device and on several, and comparing all of it."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

WEIGHTS = 2e-5
LOGS = 1e-5


@dataclass
class Trained:
    """All that a training leaves behind."""

    model: keras.Model
    weights: list[np.ndarray]
    optimizer: list[np.ndarray]
    logs: dict[str, Any]
    predictions: Any


def scope(strategy: Any):
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def train(
    strategy: Any,
    make: Callable[[], keras.Model],
    x: Any,
    y: Any,
    batch_size: int = 8,
    epochs: int = 2,
    seed: int = 1,
    **fit: Any,
) -> Trained:
    """Makes a compiled model in the scope and trains it outside of it."""
    keras.utils.set_random_seed(seed)
    with scope(strategy):
        model = make()
    history = model.fit(
        x, y, batch_size=batch_size, epochs=epochs, verbose=0, **fit
    ).history
    logs = {
        f"{key} of epoch {i}": v
        for key, vs in history.items()
        for i, v in enumerate(vs)
    }
    predictions = model.predict(x, batch_size=batch_size, verbose=0)
    return Trained(
        model=model,
        weights=[np.array(w) for w in model.get_weights()],
        optimizer=[
            keras.ops.convert_to_numpy(v.value) for v in model.optimizer.variables
        ],
        logs=logs,
        predictions=predictions,
    )


def differences(one: Trained, many: Trained) -> dict[str, float]:
    """The largest differences between two trainings."""
    assert one.logs.keys() == many.logs.keys()
    assert [v.shape for v in one.weights] == [v.shape for v in many.weights]
    return {
        "weights": largest(one.weights, many.weights),
        "optimizer": largest(one.optimizer, many.optimizer),
        "logs": largest(list(one.logs.values()), list(many.logs.values())),
        "predictions": largest(
            keras.tree.flatten(one.predictions), keras.tree.flatten(many.predictions)
        ),
    }


def largest(one: list[Any], many: list[Any]) -> float:
    """The largest absolute difference between arrays, all of them finite."""
    worst = 0.0
    for a, b in zip(one, many, strict=True):
        a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
        assert a.shape == b.shape
        assert np.isfinite(a).all() and np.isfinite(b).all()
        if a.size:
            worst = max(worst, float(np.abs(a - b).max()))
    return worst


def assert_equal(one: Trained, many: Trained, record: Any = None) -> None:
    """Asserts that two trainings are the same, to the tolerances above."""
    found = differences(one, many)
    if record is not None:
        for name, value in found.items():
            record(name, value)
    assert found["weights"] <= WEIGHTS, found
    assert found["optimizer"] <= WEIGHTS, found
    assert found["logs"] <= LOGS, found
    assert found["predictions"] <= LOGS, found
