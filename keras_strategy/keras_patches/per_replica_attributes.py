"""Where Keras notices what is set on a layer."""

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
from keras_strategy.keras_patches.patch import Extension, changed, home_of

_tracking = home_of("TrackedList TrackedDict TrackedSet", "keras.src.utils.tracking")


@dataclass(frozen=True)
class _Noted(Extension):
    """What a replica sets on a layer is its own until the run ends.

    No hooks of single functions: they are called very often, and outside of a replica
    each costs one look at where this thread is. They are put in place when a replica
    takes its turn.

    Attributes:
        owner: The class.
        methods: What changes an object of it, and what makes that which is called in
            the place of each.
    """

    owner: Any
    methods: dict[str, Callable[[Callable], Callable]]

    @property
    def target(self) -> str:
        """The class."""
        return f"{self.owner.__name__}.{next(iter(self.methods))}"

    @property
    def when(self) -> Callable[..., Any]:
        """The condition."""
        return current_attributes

    def check(self) -> None:
        """Raises `KerasVersionError` unless the class has all of them."""
        for name in self.methods:
            if not hasattr(self.owner, name):
                raise changed(f"{self.owner.__name__}.{name}", "is gone")

    def install(self) -> None:
        """Has them noted as soon as there is a replica that takes turns."""
        # On JAX there need be none, and Keras sets attributes in each step of fit.
        before: dict[str, tuple[Any, Any]] = {}

        def put():
            for name, around in self.methods.items():
                original = inspect.getattr_static(self.owner, name)
                replacement = functools.wraps(original)(around(original))
                before[name] = vars(self.owner).get(name, ABSENT), replacement
                setattr(self.owner, name, replacement)

        def take():
            for name, (original, replacement) in before.items():
                if vars(self.owner)[name] is not replacement:
                    continue  # somebody else has put something around it
                if original is ABSENT:
                    delattr(self.owner, name)
                else:
                    setattr(self.owner, name, original)

        setattr_hooks.add(put, take)


def _setting(original: Callable) -> Callable:
    def replacement(self, name, value):
        own = current_turn.attributes
        # Keras sets some to what they are, in every call of a layer.
        if own is not None and vars(self).get(name, ABSENT) is not value:
            own.set(self, name, value)
        return original(self, name, value)

    return replacement


def _deleting(original: Callable) -> Callable:
    def replacement(self, name):
        own = current_turn.attributes
        if own is not None:
            own.set(self, name, ABSENT)
        return original(self, name)

    return replacement


def _changing(original: Callable) -> Callable:
    def replacement(self, *args, **kwargs):
        own = current_turn.attributes
        # Keras clears empty lists all the time.
        if own is not None and (self or args):
            own.change(self, args)
        return original(self, *args, **kwargs)

    return replacement


def _container(kind: Any, methods: str) -> _Noted:
    return _Noted(kind, dict.fromkeys(methods.split(), _changing))


_DICT = "update setdefault pop popitem clear __setitem__ __delitem__ __ior__"

_layer = _Noted(keras.Layer, {"__setattr__": _setting, "__delattr__": _deleting})
_list = _container(
    _tracking.TrackedList,
    "append extend insert remove pop clear reverse sort"
    " __setitem__ __delitem__ __iadd__",
)
_dict = _container(_tracking.TrackedDict, _DICT)
# Keras 3.13 and older make a TrackedDict of an ordered dictionary, too.
if hasattr(_tracking, "TrackedOrderedDict"):
    _ordered_dict = _container(_tracking.TrackedOrderedDict, _DICT)
_set = _container(
    _tracking.TrackedSet,
    "add update discard remove pop clear __ior__ __iand__ __isub__ __ixor__",
)
