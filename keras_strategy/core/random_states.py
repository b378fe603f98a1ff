"""The generators of random numbers that a process has, and may not be drawn from."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np

from keras_strategy.core.registry import get_engine


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """Puts Python's, NumPy's and the engine's generator back where they were."""
    engine = get_engine()
    states = random.getstate(), np.random.get_state(), engine.random_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if states[2] is not None:
            engine.set_random_state(states[2])
