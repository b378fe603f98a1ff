"""Patches that record attributes which a replica sets on Keras layers."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

from keras_strategy.core.per_replica_attributes import (
    ABSENT,
    current_attributes,
    current_turn,
    setattr_hooks,
)
from keras_strategy.keras_patches.patch import Patch, find_module, keras_changed_error

_tracking = find_module(
    "TrackedList TrackedDict TrackedSet", "keras.src.utils.tracking"
)


@dataclass(frozen=True)
class _Noted(Patch):
    """Keep what a replica sets on a layer separate per replica until the run ends."""

    # These functions are called very often, so they are replaced only while replicas
    # take turns, and the replacement costs one thread-local lookup otherwise.

    owner: Any
    # For each mutating method, a function that wraps the original.
    methods: dict[str, Callable[[Any], Any]]
    condition: Callable[..., Any] | None = current_attributes

    @property
    def target(self) -> str:
        return f"{self.owner.__name__}.{next(iter(self.methods))}"

    def check(self) -> None:
        for name in self.methods:
            if not hasattr(self.owner, name):
                raise keras_changed_error(f"{self.owner.__name__}.{name}", "is gone")

    def install(self) -> None:
        """Register the replacement for the time in which replicas take turns."""
        # JAX may have no such turns, and Keras sets attributes in each step of fit.
        before: dict[str, tuple[Any, Any]] = {}

        def put():
            for name, around in self.methods.items():
                original = inspect.getattr_static(self.owner, name)
                replacement = around(original)
                before[name] = vars(self.owner).get(name, ABSENT), replacement
                setattr(self.owner, name, replacement)

        def take():
            for name, (original, replacement) in before.items():
                if vars(self.owner)[name] is not replacement:
                    continue  # patched again by other code
                if original is ABSENT:
                    delattr(self.owner, name)
                else:
                    setattr(self.owner, name, original)

        setattr_hooks.add(put, take)


def _setting(original: Callable) -> Callable:
    @functools.wraps(original)
    def replacement(self, name, value):
        own = current_turn.attributes
        # Keras sets some to the same value in every call of a layer.
        if own is not None and vars(self).get(name, ABSENT) is not value:
            setter = getattr(getattr(type(self), name, None), "fset", None)
            if setter is not None:
                # TensorFlow's layers would not call it for the value that they have,
                # but a turn's end does not restore what else it set.
                return setter(self, value)
            own.set(self, name, value)
        return original(self, name, value)

    return replacement


def _deleting(original: Callable) -> Callable:
    @functools.wraps(original)
    def replacement(self, name):
        own = current_turn.attributes
        if own is not None:
            own.set(self, name, ABSENT)
        return original(self, name)

    return replacement


def _changing(original: Callable) -> Callable:
    @functools.wraps(original)
    def replacement(self, *args, **kwargs):
        own = current_turn.attributes
        # Keras often clears empty lists.
        if own is not None and (self or args):
            own.change(self, args)
        return original(self, *args, **kwargs)

    return replacement


def _setting_trainable(original: property) -> property:
    def set_trainable(self, value):
        own = current_turn.attributes
        if own is not None:
            own.set(self, "trainable", value)
        original.__set__(self, value)

    return original.setter(set_trainable)


def _container(kind: Any, methods: str) -> _Noted:
    return _Noted(kind, dict.fromkeys(methods.split(), _changing))


_DICT = "update setdefault pop popitem clear __setitem__ __delitem__ __ior__"

_layer = _Noted(keras.Layer, {"__setattr__": _setting, "__delattr__": _deleting})
# A layer's `trainable` sets that of its variables.
_variable = _Noted(keras.Variable, {"trainable": _setting_trainable})
_list = _container(
    _tracking.TrackedList,
    "append extend insert remove pop clear reverse sort"
    " __setitem__ __delitem__ __iadd__",
)
_dict = _container(_tracking.TrackedDict, _DICT)
# Absent in Keras 3.13 and older, which use TrackedDict.
if hasattr(_tracking, "TrackedOrderedDict"):
    _ordered_dict = _container(_tracking.TrackedOrderedDict, _DICT)
_set = _container(
    _tracking.TrackedSet,
    "add update discard remove pop clear __ior__ __iand__ __isub__ __ixor__",
)
