"""Access to the adapter of the Keras backend in use, and the random generators.

Names of tf.distribute that this package does not implement are defined here, too. Some
exist on no backend; the server classes are native on TensorFlow.
"""

import contextlib
import functools
import importlib
import random
from collections.abc import Iterator
from typing import Any, NoReturn

import keras
import numpy as np

from keras_strategy.core.protocols import Engine
from keras_strategy.errors import TENSORFLOW_ONLY, UnsupportedBackendError

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


class UnsupportedName:
    """Class attribute for a tf.distribute name: reading it raises AttributeError."""

    def __init__(self, reason: str):
        self.reason = reason

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> NoReturn:
        raise AttributeError(
            f"{owner.__name__!r} has no attribute {self._name!r}, which tf.distribute "
            f"has. {self.reason}"
        )


@functools.cache
def native_or_unsupported(name: str) -> Any:
    """Return tf.distribute's object of a name in `TENSORFLOW_ONLY`, or a substitute."""
    found = get_engine().native(name)
    if found is not None:
        return found
    members = {"__doc__": TENSORFLOW_ONLY[name], "__module__": __name__}
    return _UnsupportedMeta(name.rpartition(".")[2], (), members)


class _UnsupportedMeta(type):
    """Type of a class without instances and attributes, such as factory functions."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedBackendError(cls._message())

    def __getattr__(cls, name: str) -> NoReturn:
        raise AttributeError(cls._message())

    def _message(cls) -> str:
        return (
            f"`{cls.__name__}` of tf.distribute is not available with the Keras "
            f"backend in use, '{get_engine().name}'. {cls.__doc__}"
        )


def __getattr__(name: str) -> Any:
    if name in TENSORFLOW_ONLY:
        return native_or_unsupported(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
