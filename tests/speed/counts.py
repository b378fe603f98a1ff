"""Counts of what a training step asks a backend to do."""

import importlib
from collections.abc import Callable

import keras


def count_operations(
    train: Callable[[int], None], steps: int
) -> tuple[int, int, int, int]:
    """Count the collectives, a replica's bytes in them, programs and copies.

    Args:
        train: Trains a number of steps.
        steps: That number.
    """
    name = f"tests.speed.counts_{keras.backend.backend()}"
    return importlib.import_module(name).count(train, steps)
