"""The generators of random numbers that a process has, and may not be drawn from."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np

from keras_strategy.core.registry import get_engine


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """Puts Python's, NumPy's and the engine's generator back where they were.

    A process that has no seed gets none: with one, TensorFlow would shuffle alike in
    each epoch of what comes later.
    """
    engine = get_engine()
    of_engine = engine.random_state(seeded=False)
    states = random.getstate(), np.random.get_state(), of_engine
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if states[2] is not None:
            engine.set_random_state(states[2])
