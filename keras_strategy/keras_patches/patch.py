"""Extending a function of Keras only where it is the function we know.

Every hook names the Keras function it replaces and the signature that this
function had when the hook was written. All of them are checked before the first
is installed: a Keras that changed is refused as a whole rather than trained with
half of the hooks.

Keras moves its modules between versions, too. Where that happened, a hook names the
function and all its known homes, and takes the one that this Keras has.

When a hook has something to do; each is asked at every call of a hooked function.

They return what they look for, which the hook then works with, or None.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import keras

from keras_strategy.core import context
from keras_strategy.errors import KerasVersionError
from keras_strategy.training.ownership import strategy_of_model

_Function = TypeVar("_Function", bound=Callable[..., Any])
_ATTRIBUTE = "_ks_hooks"
_OF_SEVERAL = "_ks_of_several"


def of_several(condition: _Function) -> _Function:
    """Marks a condition that is not met as long as each strategy has one replica."""
    vars(condition)[_OF_SEVERAL] = True
    return condition


class Extension:
    """One place of Keras that is extended."""

    @property
    def target(self) -> str:
        """The place, as Keras calls it."""
        raise NotImplementedError

    @property
    def room(self) -> str:
        """The module that extends it."""
        return type(self).__module__

    @property
    def why(self) -> str:
        """Why, in a sentence or two."""
        return _first_paragraph(type(self))

    @property
    def when(self) -> Callable[..., Any] | None:
        """What must be there for it to act; None if it always does."""
        return None

    @property
    def of_several(self) -> bool:
        """Whether it has nothing to do as long as each strategy has one replica."""
        return hasattr(self.when, _OF_SEVERAL)

    @property
    def name(self) -> str:
        """What distinguishes it from all others."""
        return f"{self.room.removeprefix('keras_strategy.')} {self.target}"

    def is_needed(self) -> bool:
        """Whether this Keras needs it."""
        return True

    def check(self) -> None:
        """Raises `KerasVersionError` unless the place is as it was."""
        raise NotImplementedError

    def install(self) -> None:
        """Extends it."""
        raise NotImplementedError


@dataclass(frozen=True)
class Hook(Extension):
    """One function of Keras and what takes its place.

    Attributes:
        owner: The class or module that has the function.
        attribute: The function's name in `owner`.
        signature: What the hook relies on. A string: all parameters, as
            `inspect.signature` writes them. A tuple: the names of some parameters,
            for a hook that passes the others through. None: it is a property.
        function: What is called in its place, see `hook`.
        condition: The `when` of `hook`.
        owner_name: What Keras's users call the owner, if it has another name itself.
        needed: See `hook`.
        several: See `hook`.
    """

    owner: Any
    attribute: str
    signature: str | tuple[str, ...] | None
    function: Callable[..., Any]
    condition: Callable[..., Any] | None = None
    owner_name: str | None = None
    needed: Callable[[], bool] | None = None
    several: bool = False

    def is_needed(self) -> bool:
        """Whether this Keras needs it."""
        return self.needed is None or self.needed()

    @property
    def target(self) -> str:
        """The function's name with its owner's."""
        owner = self.owner_name or getattr(self.owner, "__qualname__", None)
        return f"{owner or self.owner.__name__}.{self.attribute}"

    @property
    def room(self) -> str:
        """The module of the hook's function."""
        return self.function.__module__

    @property
    def why(self) -> str:
        """What the hook's function says of itself."""
        return _first_paragraph(self.function)

    @property
    def when(self) -> Callable[..., Any] | None:
        """The condition."""
        return self.condition

    @property
    def of_several(self) -> bool:
        """Whether it has nothing to do as long as each strategy has one replica."""
        return self.several or super().of_several

    def check(self) -> None:
        """Raises `KerasVersionError` unless the function is as it was."""
        original = inspect.getattr_static(self.owner, self.attribute, None)
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
        """Puts the hook's function in the function's place."""
        original = inspect.getattr_static(self.owner, self.attribute)
        replacement: Any
        if isinstance(original, property):
            assert original.fget is not None
            replacement = property(
                self._around(original.fget, functools.partial),
                original.fset,
                original.fdel,
                original.__doc__,
            )
        else:
            function = getattr(original, "__func__", original)
            replacement = self._around(function, _bound)
            functools.update_wrapper(replacement, function)
            # Keras derives configurations from constructors with `getfullargspec`,
            # which does not look behind a wrapper.
            replacement.__signature__ = inspect.signature(function)
            if isinstance(original, staticmethod):
                replacement = staticmethod(replacement)
        setattr(self.owner, self.attribute, replacement)

    def _around(self, original: Callable, always: Callable) -> Callable:
        """What asks the condition, at each call.

        Some functions of Keras are called hundreds of times in a step: a call that is
        none of the hook's business costs this one and the condition's.
        """
        function, when = self.function, self.condition
        if when is None:
            return always(function, original)
        if not inspect.signature(when).parameters:

            def replacement(*args, **kwargs):
                found = when()
                if found is None:
                    return original(*args, **kwargs)
                return function(original, found, *args, **kwargs)

        else:

            def replacement(*args, **kwargs):
                found = when(args[0])
                if found is None:
                    return original(*args, **kwargs)
                return function(original, found, *args, **kwargs)

        return replacement


def _bound(function: Callable, original: Callable) -> Callable:
    """As `functools.partial`, which a class would not give its instances to."""

    def replacement(*args, **kwargs):
        return function(original, *args, **kwargs)

    return replacement


def hook(
    owner: Any,
    attribute: str | tuple[str, ...],
    signature: str | tuple[str, ...] | None,
    when: Callable[..., Any] | None = None,
    needed: Callable[[], bool] | None = None,
    several: bool = False,
    owner_name: str | None = None,
) -> Callable[[_Function], _Function]:
    """Marks a function that is to be called in the place of one of Keras's.

    It is called with the original function, then with what `when` found if there is
    a condition, then with the arguments of the call. Nothing is installed by this:
    `hooks_of` finds the marks of a module, and `install` installs them.

    Args:
        owner: The class or module that has the function.
        attribute: The function's name in `owner`; several names if they share a
            signature and a hook, which can tell them apart by `original.__name__`.
        signature: See `Hook`.
        when: The condition, asked at each call: a function of nothing, or of the
            call's first argument. Where it returns None the original is called, and
            nothing else.
        needed: Asked once, before hooks are installed: whether this Keras, on this
            backend, needs the hook; None if every one does.
        several: Whether it has nothing to do as long as each strategy has one replica,
            where no condition says so that was marked with `of_several`.
        owner_name: See `Hook`.

    Example:

    ```python
    @hook(keras.Variable, "assign", "(self, value)", when=in_replica)
    def _assign(original, replica, self, value):
        return original(self, replica.all_reduce("SUM", value))
    ```
    """
    attributes = (attribute,) if isinstance(attribute, str) else attribute

    def mark(function: _Function) -> _Function:
        for name in attributes:
            place = (owner, name, signature, function, when)
            _mark(function, Hook(*place, owner_name, needed, several))
        return function

    return mark


def model_hook(
    attribute: str | tuple[str, ...],
    signature: str | tuple[str, ...] | None,
    when: Callable[..., Any] | None = None,
) -> Callable[[_Function], _Function]:
    """A hook on methods of models, in the class that defines them.

    That is the trainer of the backend for most: a layer may inherit from one without
    being a model. And where Keras compares a method with its base's to see whether a
    user overrode it, a hook must sit where the method is defined.

    Args:
        attribute: See `hook`, as the others.
        signature: What the hook relies on.
        when: The condition.
    """
    attributes = (attribute,) if isinstance(attribute, str) else attribute

    def mark(function: _Function) -> _Function:
        for name in attributes:
            mro = keras.Model.__mro__
            owner = next((c for c in mro if name in vars(c)), keras.Model)
            _mark(function, Hook(owner, name, signature, function, when, "Model"))
        return function

    return mark


def _mark(function: Any, mark: Hook) -> None:
    vars(function).setdefault(_ATTRIBUTE, []).append(mark)


def _first_paragraph(documented: Any) -> str:
    paragraph = inspect.cleandoc(documented.__doc__ or "").split("\n\n")[0]
    return " ".join(paragraph.split())


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


def hooks_of(*modules: ModuleType) -> list[Extension]:
    """All that some modules extend, in the order in which it is written there."""
    found: list[Extension] = []
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, Extension):
                found.append(value)
            elif inspect.isfunction(value) and value.__module__ == module.__name__:
                found += getattr(value, _ATTRIBUTE, ())
    return found


def fitting(extensions: Iterable[Extension]) -> list[Extension]:
    """Those that this Keras needs; `KerasVersionError` where one does not fit."""
    needed = [one for one in extensions if one.is_needed()]
    for one in needed:
        one.check()
    return needed


def install(extensions: Iterable[Extension]) -> None:
    """Installs all that this Keras needs, or nothing where something does not fit.

    What has nothing to do with one replica waits for `install_those_of_several`, and
    costs nothing until then.
    """
    for extension in fitting(extensions):
        if extension.of_several:
            _waiting.append(extension)
        else:
            extension.install()


_waiting: list[Extension] = []


def install_those_of_several() -> None:
    """Installs what was found to fit, and waits for a strategy of several replicas."""
    while _waiting:
        _waiting.pop(0).install()


# Not wrapped: some hooks ask hundreds of times in a step.
in_replica = of_several(context.distributed_replica)
in_replica_or_dry_run = of_several(context.replica_or_dry_run)
in_scope = context.current_scope
of_strategy = strategy_of_model


@of_several
def before_apply() -> Any:
    """The replica that is running, but inside `optimizer.apply`.

    There all replicas compute on equal inputs.
    """
    replica = context.distributed_replica()
    return None if replica is None or replica.step.is_applying else replica


@of_several
def in_step() -> Any:
    """The replica that is running, in a training step, where it speaks for its rows."""
    replica = context.distributed_replica()
    return None if replica is None or replica.step.row_weight is None else replica


@of_several
def in_distributed_scope() -> Any:
    """The strategy whose scope this thread is in, if it has several replicas."""
    strategy = context.current_scope()
    if strategy is None or strategy.num_replicas_in_sync == 1:
        return None
    return strategy


@of_several
def in_scope_of_workers() -> Any:
    """The strategy whose scope this thread is in, if it is of several workers."""
    strategy = context.current_scope()
    return None if strategy is None or strategy.extended.cluster is None else strategy


@of_several
def of_distributed_strategy(model: Any) -> Any:
    """The strategy that a model trains under, if it has several replicas."""
    strategy = strategy_of_model(model)
    if strategy is None or strategy.num_replicas_in_sync == 1:
        return None
    return strategy


@of_several
def of_workers(model: Any) -> Any:
    """The strategy that a model trains under, if it is of several workers."""
    strategy = strategy_of_model(model)
    return None if strategy is None or strategy.extended.cluster is None else strategy
