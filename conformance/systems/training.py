"""Building, `fit` and results, which systems share."""

import dataclasses
from typing import Any

import keras
import numpy as np

from conformance.program import Program

SEED = 1


@dataclasses.dataclass
class Outcome:
    """Results of a training.

    Attributes:
        initial: The weights before the training, those of the reference.
        weights: The weights after it.
        logs: A number for each log of each epoch.
        warnings: The warnings that the system logged.
    """

    initial: list[np.ndarray]
    weights: list[np.ndarray]
    logs: dict[str, float]
    warnings: list[str] = dataclasses.field(default_factory=list)


class NotApplicable(Exception):
    """A program that a system is not made for."""


def build(program: Program, initial: list[np.ndarray] | None) -> keras.Model:
    """Build the model of a program, with the seed and the weights of the reference."""
    if keras.backend.backend() in program.not_on:
        raise NotApplicable(program.not_on[keras.backend.backend()])
    keras.utils.set_random_seed(SEED)
    model = program.build()
    if initial is not None:
        model.set_weights(initial)
    return model


def fit(model: keras.Model, program: Program) -> Outcome:
    """Train by `fit` on arrays."""
    data = program.data(program.rows)
    how = {"sample_weight": data.sample_weight, "batch_size": program.batch_size}
    if program.validation:
        validation = program.data(program.validation)
        how["validation_data"] = validation.x, validation.y
    return fit_data(model, program, data.x, data.y, **how)


def fit_data(model: keras.Model, program: Program, x: Any, *y: Any, **how: Any):
    """Train by `fit` on data of any kind, and return the outcome."""
    initial = model.get_weights()
    history = model.fit(
        x,
        *y,
        epochs=program.epochs,
        shuffle=False,
        verbose=0,
        class_weight=program.class_weight,
        callbacks=program.callbacks(),
        **how,
    ).history
    logs = {
        f"{key}, epoch {epoch}": float(value)
        for key, values in history.items()
        for epoch, value in enumerate(values)
    }
    return Outcome(initial, model.get_weights(), logs)
