"""Rows of the equality table."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras

from conformance import models
from conformance.compare import LOGS, WEIGHTS

# Rounding in half floats differs by more when the rows are only reordered. Predictions
# are half floats themselves: one unit in the last place, for values from 1 to 2.
FLOAT16: dict[str, Any] = {"weights": 5e-3, "logs": 2e-3, "predictions": 2**-10}
BFLOAT16: dict[str, Any] = {"weights": 5e-3, "logs": 2e-3, "predictions": 2**-7}


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        name: Its name.
        make: Returns a compiled model.
        data: Returns inputs and targets of a number of rows.
        fit: Returns further arguments of `fit` for a number of rows.
        weights: The largest difference allowed in a weight.
        logs: The largest difference allowed in a log.
        predictions: The largest difference allowed in a prediction.
        not_on: The backends on which one device cannot do it, with the reason.
        policy: The global dtype policy.
    """

    name: str
    make: Callable[[], keras.Model]
    data: Callable[[int], tuple[Any, Any]] = models.regression
    fit: Callable[[int], dict[str, Any]] = field(default=lambda rows: {})
    weights: float = WEIGHTS
    logs: float = LOGS
    predictions: float = LOGS
    not_on: dict[str, str] = field(default_factory=dict)
    policy: str = "float32"


def in_mlp(*middle: Callable[[], keras.Layer]) -> Callable[[], keras.Model]:
    """Return a function that compiles an MLP with layers that functions make."""
    return lambda: models.compiled(models.mlp(*middle))


def tagger(
    embedding: Callable[[], keras.Layer],
    optimizer: Callable[[], Any] = lambda: None,
    loss: Any = "sparse_categorical_crossentropy",
    **compile: Any,
) -> Callable[[], keras.Model]:
    """Return a function that compiles a model of a class for each word."""
    return lambda: models.compiled(
        models.sequences(embedding()), optimizer(), loss, **compile
    )


def shipped(module: Any, base: type, without: set[str]) -> Iterator[type]:
    """Return the classes that a module of Keras offers, each once, by name."""
    found = {}
    for name, value in sorted(vars(module).items()):
        if inspect.isclass(value) and issubclass(value, base) and value is not base:
            found.setdefault(value, name)
    return (cls for cls, name in found.items() if name not in without)
