"""Hints at code of another backend that is left in a step."""

import re
import traceback
from typing import Any

import keras

from keras_strategy.core.registry import SUPPORTED
from keras_strategy.options import check_call

_INSTEAD = (
    "Compute gradients with `keras_strategy.value_and_grad`, which works on every "
    "backend, instead of a gradient tape, `backward` or a library's `grad`. Remove "
    "`tf.function` and `jax.jit`, because `strategy.run` and `fit` compile. Use "
    "`keras.ops` for other functions."
)
# Texts of errors that have no frame of the library.
_SIGNS = {"jax": "JAX has removed its internal frames", "torch": "attribute '?backward"}


def _foreign_library(name: Any) -> str | None:
    """Return the other backend that a module name belongs to, or None."""
    library = str(name).partition(".")[0]
    is_foreign = library in SUPPORTED and library != keras.backend.backend()
    return library if is_foreign else None


def check_function(fn: Any, args: Any) -> None:
    """Raise unless `run` can call `fn` with `args`."""
    check_call(fn, args)
    library = _foreign_library(type(fn).__module__)
    if library is not None:
        raise TypeError(
            f"Argument `fn` must be a Python function. Received a function of {library}"
            f", but the Keras backend is {keras.backend.backend()}: {fn!r}. {_INSTEAD}"
        )


def add_backend_hint(error: Exception) -> None:
    """Add a note to an error of a step that code of another backend has raised."""
    library = caller = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__"))
        library = _foreign_library(module)
        if library is not None:
            break
        if module.partition(".")[0] not in SUPPORTED:
            caller = f"{frame.f_code.co_filename}:{line}"
    text = " ".join([str(error), *getattr(error, "__notes__", ())])
    for name, sign in _SIGNS.items():
        if library is None and re.search(sign, text):
            library = _foreign_library(name)
    if library is not None:
        error.add_note(
            f"The step uses {library} at {caller}, but the Keras backend is "
            f"{keras.backend.backend()}. {_INSTEAD}"
        )
