"""Figures of a training step that no machine changes: what travels, and what is called.

A time says little about another machine. How many collectives a step has, how many
bytes they carry and how often our own Python is entered is the same everywhere, so
tests can hold on to it.
"""

import gc
import math
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import keras
import numpy as np

import keras_strategy
from tests.speed.counts import count_operations

_OURS = str(Path(keras_strategy.__file__).parent)


@dataclass(frozen=True)
class Figures:
    """Costs of a training step beside its arithmetic.

    Attributes:
        collectives: Collectives of a step, those of gradients, logs and checks.
        bytes: What one replica gives to them in a step.
        gradient_bytes: The bytes of one copy of the gradients.
        compilations: How often a program was compiled in 100 further steps of the same
            shapes; the first step's own is one more.
        transfers: Copies between host and devices in a step; the batch is one for each
            array and replica.
        python_calls: Python functions of this package that a step enters, in all
            threads.
    """

    collectives: float
    bytes: float
    gradient_bytes: int
    compilations: int
    transfers: float
    python_calls: float


def figures_of(train: Callable[[int], None], model: keras.Model) -> Figures:
    """Count the operations of a program in a training step.

    Args:
        train: Trains the model for so many steps.
        model: The model, or one like it, for the bytes of its gradients.

    Returns:
        The figures. What a call costs once is not in those of a step: they are the
        difference of a long and a short call.
    """
    count = count_operations
    # First of all, so that the replicas' threads start under the profiler.
    python_calls(train, 2)
    calls = python_calls(train, 30) - python_calls(train, 10)
    compilations = count(train, 100)[2]
    short, long = count(train, 10), count(train, 30)
    collectives, data, _, transfers = (
        (b - a) / 20 for a, b in zip(short, long, strict=True)
    )
    return Figures(
        collectives=collectives,
        bytes=data,
        gradient_bytes=sum(
            math.prod(v.shape) * np.dtype(v.dtype).itemsize
            for v in model.trainable_variables
        ),
        compilations=compilations,
        transfers=transfers,
        python_calls=calls / 20,
    )


# One for all threads: a thread keeps the profiler that it was started with.
_calls = 0


def _profile(frame: FrameType, event: str, argument: object) -> None:
    global _calls
    if event == "call" and frame.f_code.co_filename.startswith(_OURS):
        _calls += 1


def python_calls(train: Callable[[int], None], steps: int) -> int:
    """Count the calls of this package's Python functions, in all threads."""
    # What others have left is not to be released meanwhile: that calls functions, too.
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    before = _calls
    threading.setprofile(_profile)
    sys.setprofile(_profile)
    try:
        train(steps)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        if collects:
            gc.enable()
    return _calls - before
