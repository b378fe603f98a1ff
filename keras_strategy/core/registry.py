"""Access to the adapter of the Keras backend in use, and the random generators."""

import contextlib
import functools
import importlib
import random
from collections.abc import Iterator

import keras
import numpy as np

from keras_strategy.core.protocols import Engine
from keras_strategy.errors import UnsupportedBackendError

SUPPORTED = ("jax", "torch", "tensorflow")


@functools.cache
def get_engine() -> Engine:
    """Return the adapter for `keras.backend.backend()`, if that backend can train."""
    name = keras.backend.backend()
    if name not in SUPPORTED:
        raise UnsupportedBackendError(
            "keras_strategy trains on the Keras backends 'jax', 'torch' and "
            f"'tensorflow'. The backend in use is '{name}'. Set the environment "
            "variable KERAS_BACKEND to one of the three before Keras is imported."
        )
    return importlib.import_module(f"keras_strategy.backends.{name}").engine


@contextlib.contextmanager
def preserve_random_states() -> Iterator[None]:
    """Restore the Python, NumPy and backend generators on exit."""
    engine = get_engine()
    python_state, numpy_state = random.getstate(), np.random.get_state()
    # An unseeded one stays so: seeded, TensorFlow would shuffle later epochs alike.
    backend_state = engine.random_state(seeded=False)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if backend_state is not None:
            engine.set_random_state(backend_state)
