"""Adapter of the Keras backend in use, imported on first use."""

import functools
import importlib

import keras

from keras_strategy.core.engine import Engine
from keras_strategy.errors import UnsupportedBackendError

SUPPORTED = ("jax", "torch", "tensorflow")


@functools.cache
def get_engine() -> Engine:
    """Return the adapter for `keras.backend.backend()`.

    Raises:
        UnsupportedBackendError: If that backend cannot train.
    """
    name = keras.backend.backend()
    if name not in SUPPORTED:
        raise UnsupportedBackendError(
            "keras_strategy trains on the Keras backends 'jax', 'torch' and "
            f"'tensorflow'. The backend in use is '{name}'. Set the environment "
            "variable KERAS_BACKEND to one of the three before Keras is imported."
        )
    return importlib.import_module(f"keras_strategy.backends.{name}").engine
