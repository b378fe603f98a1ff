"""Extending a function of Keras only where it is the function we know.

Every hook names the Keras function it replaces and the signature that this
function had when the hook was written. All of them are checked before the first
is installed: a Keras that changed is refused as a whole rather than trained with
half of the hooks.

Keras moves its modules between versions, too. Where that happened, a hook names the
function and all its known homes, and takes the one that this Keras has.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import keras

from keras_strategy.errors import KerasVersionError


@dataclass(frozen=True)
class Hook:
    """One function of Keras and what takes its place.

    Attributes:
        owner: The class or module that has the function.
        name: The function's name in `owner`.
        signature: What the hook relies on. A string: all parameters, as
            `inspect.signature` writes them. A tuple: the names of some parameters,
            for a hook that passes the others through. None: it is a property.
        replace: Takes the original function, returns the replacement.
    """

    owner: Any
    name: str
    signature: str | tuple[str, ...] | None
    replace: Callable[[Any], Any]

    @property
    def target(self) -> str:
        """The function's name with its owner's."""
        owner = getattr(self.owner, "__qualname__", None) or self.owner.__name__
        return f"{owner}.{self.name}"

    def check(self) -> None:
        """Raises `KerasVersionError` unless the function is as it was."""
        original = inspect.getattr_static(self.owner, self.name, None)
        if original is None:
            raise changed(self.target, "is gone")
        if isinstance(original, property):
            if self.signature is not None:
                raise changed(self.target, "became a property")
            return
        if self.signature is None:
            raise changed(self.target, "is no longer a property")
        # Annotations come and go between Keras versions and change nothing.
        parameters = [
            parameter.replace(annotation=inspect.Parameter.empty)
            for parameter in inspect.signature(
                getattr(original, "__func__", original)
            ).parameters.values()
        ]
        if isinstance(self.signature, tuple):
            names = {parameter.name for parameter in parameters}
            missing = [name for name in self.signature if name not in names]
            if missing:
                raise changed(self.target, f"no longer takes {', '.join(missing)}")
            return
        found = str(inspect.Signature(parameters))
        if found != self.signature:
            raise changed(
                self.target, f"takes {found}, where {self.signature} is known"
            )

    def install(self) -> None:
        """Puts the replacement in the function's place."""
        original = inspect.getattr_static(self.owner, self.name)
        function = getattr(original, "__func__", original)
        replacement = self.replace(function)
        if not isinstance(original, property):
            functools.update_wrapper(replacement, function)
            # Keras derives configurations from constructors with `getfullargspec`,
            # which does not look behind a wrapper.
            replacement.__signature__ = inspect.signature(function)
        if isinstance(original, staticmethod):
            replacement = staticmethod(replacement)
        setattr(self.owner, self.name, replacement)


def changed(target: str, what: str) -> KerasVersionError:
    """The error that refuses this Keras.

    Args:
        target: The function or class of Keras.
        what: What became of it.
    """
    return KerasVersionError(
        f"Keras {keras.__version__} changed a function that keras_strategy extends: "
        f"`{target}` {what}. Please upgrade keras_strategy, or install a Keras version "
        "that it supports."
    )


def home_of(names: str, *modules: str) -> Any:
    """The first of some modules that has all of some names.

    A module that moved is known by what it provides: a version number says nothing
    about a development version, nor about a fork.

    Args:
        names: What is looked for, separated by spaces.
        *modules: The full names of the modules that had it in some version.

    Raises:
        KerasVersionError: If this Keras has it in none of them.
    """
    wanted = names.split()
    missing = wanted
    for module in modules:
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            # A module that is there and lacks an import of its own is another matter.
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
            continue
        missing = [name for name in wanted if not hasattr(found, name)]
        if not missing:
            return found
    raise changed(
        f"{modules[0]}.{missing[0]}", f"is gone: it is not in {' or '.join(modules)}"
    )


def model_hook(name: str, signature: Any, replace: Callable[[Any], Any]) -> Hook:
    """A hook on a method of models, in the class that defines it.

    That is the trainer of the backend for most: a layer may inherit from one without
    being a model. And where Keras compares a method with its base's to see whether a
    user overrode it, a hook must sit where the method is defined.

    Args:
        name: The method's name.
        signature: See `Hook`.
        replace: See `Hook`.
    """
    mro = keras.Model.__mro__
    owner = next((c for c in mro if name in vars(c)), keras.Model)
    return Hook(owner, name, signature, replace)


def install(hooks: Iterable[Hook]) -> None:
    """Installs all `hooks`, or none of them where one does not fit."""
    hooks = list(hooks)
    for hook in hooks:
        hook.check()
    for hook in hooks:
        hook.install()
