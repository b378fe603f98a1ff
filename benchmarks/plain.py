"""Keras as it was before the first strategy was made.

A strategy extends Keras for the whole process. A peer that is to be plain Keras must
not carry that along; so it is taken out while the peer runs.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

from keras_strategy.hooks.hook import Hook

# Of each function that was extended: its owner, its name, and what it was.
_originals: list[tuple[Any, str, Any]] = []
_install = Hook.install


def _remembering(hook: Hook) -> None:
    original = inspect.getattr_static(hook.owner, hook.attribute)
    _originals.append((hook.owner, hook.attribute, original))
    _install(hook)


# Imported before the first strategy is made, which installs all of them.
Hook.install = _remembering


@contextlib.contextmanager
def plain_keras() -> Iterator[None]:
    """In it, Keras is as it was."""
    extended = [
        (owner, name, inspect.getattr_static(owner, name))
        for owner, name, _ in _originals
    ]
    # Backwards, for a function that was extended twice.
    for owner, name, original in reversed(_originals):
        setattr(owner, name, original)
    try:
        yield
    finally:
        for owner, name, function in extended:
            setattr(owner, name, function)
