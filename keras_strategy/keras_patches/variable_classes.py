"""Classes of the variables that a strategy owns or has adopted.

A variable gets its class when a scope creates it, or when a replica first uses it. All
others keep Keras's methods.
"""

import functools
import types
from typing import Any

import keras

from keras_strategy.keras_patches.patch import FunctionPatch

# Not by `super`, which torch.compile cannot trace in a property.
keras_value: Any = keras.Variable.value.fget  # pyright: ignore


class StrategyVariable(keras.Variable):
    """A variable of a strategy; each backend has a subclass for each kind."""

    kind: type["StrategyVariable"]
    plain_class: type[keras.Variable]  # that it would have without a strategy

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle does not find the class by its name.
        make, args, *rest = super().__reduce_ex__(protocol)
        if args[:1] != (type(self),):  # a custom class that reduces itself
            return make, args, *rest
        return _make, (make, self.kind, self.plain_class, *args[1:]), *rest


@functools.cache
def _class_of_kind(kind: Any, plain_class: Any) -> type[StrategyVariable]:
    # What a custom class overrides comes first. Keras names a variable after its class.
    bases = (kind,) if plain_class is keras.Variable else (plain_class, kind)
    attributes = {"__qualname__": kind.__name__, "__module__": kind.__module__}
    attributes |= {"kind": kind, "plain_class": plain_class}
    name = plain_class.__name__
    return types.new_class(name, bases, exec_body=lambda x: x.update(attributes))


def set_kind(variable: Any, kind: Any) -> None:
    """Make a variable one of a kind."""
    cls: Any = type(variable)
    plain_class = cls.plain_class if issubclass(cls, StrategyVariable) else cls
    # Keras's variables are Flax's if NNX is on, which record attributes that are set.
    object.__setattr__(variable, "__class__", _class_of_kind(kind, plain_class))


def check_overridden(signatures: dict[str, str | None]) -> None:
    """Raise `KerasVersionError` if Keras changed a method that a kind overrides."""
    for name, signature in signatures.items():
        FunctionPatch(keras.Variable, name, signature, check_overridden).check()


def _make(make: Any, kind: Any, plain_class: Any, *args: Any) -> Any:
    return make(_class_of_kind(kind, plain_class), *args)
