"""Random generators of the process."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np

from keras_strategy.core.registry import get_engine


@contextlib.contextmanager
def preserve_random_states() -> Iterator[None]:
    """Restore the Python, NumPy and backend generators on exit.

    An unseeded backend generator stays unseeded: with a seed, TensorFlow would shuffle
    later epochs alike.
    """
    engine = get_engine()
    python_state, numpy_state = random.getstate(), np.random.get_state()
    backend_state = engine.random_state(seeded=False)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if backend_state is not None:
            engine.set_random_state(backend_state)
