"""Checked patches of Keras functions, and the conditions under which they act.

A patch names the Keras function it replaces and the signature that this function had
when the patch was written. All patches are checked before the first is installed: a
Keras that changed is refused as a whole, rather than trained with half of the patches.

Keras also moves modules between versions. `find_module` takes the names that are needed
and all modules that ever had them, and returns the one that this Keras has.
"""

import functools
import importlib
import inspect
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import keras

from keras_strategy.core import context
from keras_strategy.errors import KerasVersionError
from keras_strategy.training.ownership import strategy_of_model

_Function = TypeVar("_Function", bound=Callable[..., Any])
_PATCHES = "_ks_patches"
_MULTI_REPLICA_ONLY = "_ks_multi_replica_only"


def multi_replica_only(condition: _Function) -> _Function:
    """Mark a condition that never holds while each strategy has one replica."""
    vars(condition)[_MULTI_REPLICA_ONLY] = True
    return condition


class Patch:
    """One patched place of Keras."""

    # Decides if the patch acts; None if it always does.
    condition: Callable[..., Any] | None = None
    # Returns True if this version of Keras needs the patch; None if all do.
    needed: Callable[[], bool] | None = None
    # True if the patch does nothing while each strategy has one replica, even if its
    # condition is not marked with `multi_replica_only`.
    multi_replica_only: bool = False

    @property
    def target(self) -> str:
        """The patched function, as Keras names it."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise `KerasVersionError` unless the patched place is unchanged."""
        raise NotImplementedError

    def install(self) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class FunctionPatch(Patch):
    """Patch of one Keras function; see `hook`, which creates it from its arguments."""

    owner: Any
    attribute: str
    signature: str | tuple[str, ...] | None
    function: Callable[..., Any]
    condition: Callable[..., Any] | None = None
    owner_name: str | None = None  # the public name, if the owner's is another one
    needed: Callable[[], bool] | None = None
    multi_replica_only: bool = False

    @property
    def target(self) -> str:
        owner = self.owner_name or getattr(self.owner, "__qualname__", None)
        return f"{owner or self.owner.__name__}.{self.attribute}"

    def check(self) -> None:
        original = inspect.getattr_static(self.owner, self.attribute, None)
        if original is None:
            raise keras_changed_error(self.target, "is gone")
        if isinstance(original, property):
            if self.signature is not None:
                raise keras_changed_error(self.target, "became a property")
            return
        if self.signature is None:
            raise keras_changed_error(self.target, "is no longer a property")
        # Annotations differ between Keras versions without effect.
        function = getattr(original, "__func__", original)
        parameters = [
            parameter.replace(annotation=inspect.Parameter.empty)
            for parameter in inspect.signature(function).parameters.values()
        ]
        if isinstance(self.signature, tuple):
            names = {parameter.name for parameter in parameters}
            missing = [name for name in self.signature if name not in names]
            if missing:
                raise keras_changed_error(
                    self.target, f"no longer takes {', '.join(missing)}"
                )
            return
        found = str(inspect.Signature(parameters))
        if found != self.signature:
            raise keras_changed_error(
                self.target, f"takes {found} instead of {self.signature}"
            )

    def install(self) -> None:
        original: Any = inspect.getattr_static(self.owner, self.attribute)
        function = getattr(original, "fget", getattr(original, "__func__", original))
        replacement: Any = functools.update_wrapper(
            self._around(function, not isinstance(original, property)), function
        )
        # Keras reads constructors with `getfullargspec`, which ignores wrappers.
        replacement.__signature__ = inspect.signature(function)
        if isinstance(original, property):
            replacement = original.getter(replacement)
        elif isinstance(original, staticmethod):
            replacement = staticmethod(replacement)
        setattr(self.owner, self.attribute, replacement)

    def _around(self, original: Callable, binds: bool) -> Callable:
        """Return a wrapper that checks the condition at each call."""
        # Keras calls some functions hundreds of times per step, so a call to which the
        # patch does not apply costs only the wrapper and the condition. The getter of a
        # property need not bind, and a partial saves a Python call.
        function, when = self.function, self.condition
        if when is None and not binds:
            return functools.partial(function, original)
        if when is None:
            return lambda *args, **kwargs: function(original, *args, **kwargs)
        if inspect.signature(when).parameters:

            def replacement(*args, **kwargs):
                found = when(args[0])
                if found is None:
                    return original(*args, **kwargs)
                return function(original, found, *args, **kwargs)

        else:

            def replacement(*args, **kwargs):
                found = when()
                if found is None:
                    return original(*args, **kwargs)
                return function(original, found, *args, **kwargs)

        return replacement


class MethodsPatch(Patch):
    """Patch of methods of a Keras class."""

    owner: Any
    # The function that wraps each method, by the method's name.
    wrappers: dict[str, Callable[[Any], Any]]

    @property
    def target(self) -> str:
        return f"{self.owner.__name__}.{next(iter(self.wrappers))}"

    def check(self) -> None:
        for name in self.wrappers:
            if not hasattr(self.owner, name):
                raise keras_changed_error(f"{self.owner.__name__}.{name}", "is gone")


class SubclassPatch(MethodsPatch):
    """Patch of methods of a Keras class and of all its subclasses, also the user's."""

    # A method that overrides Keras's runs before or instead of it. Classes that are
    # defined after installation are patched when they are first instantiated.

    multi_replica_only = True
    _replacements: weakref.WeakSet[Any] = weakref.WeakSet()

    def install(self) -> None:
        original = self.owner.__init__

        @functools.wraps(original)
        def initialize(instance, *args, **kwargs):
            for cls in reversed(type(instance).__mro__):
                if issubclass(cls, self.owner):
                    self._wrap_methods(cls)
            original(instance, *args, **kwargs)

        initialize.__signature__ = inspect.signature(original)  # pyright: ignore
        self.owner.__init__ = initialize
        classes = [self.owner]
        while classes:
            cls = classes.pop()
            self._wrap_methods(cls)
            classes += cls.__subclasses__()

    def _wrap_methods(self, cls: type) -> None:
        for name, wrap in self.wrappers.items():
            definer = next(base for base in cls.__mro__ if name in vars(base))
            # What a mixin defines is wrapped in the class that inherits it.
            if definer is not cls and issubclass(definer, self.owner):
                continue
            original = vars(definer)[name]
            if callable(original) and original not in self._replacements:
                replacement = functools.wraps(original)(wrap(original))
                self._replacements.add(replacement)
                setattr(cls, name, replacement)


def hook(
    owner: Any,
    attribute: str | tuple[str, ...],
    signature: str | tuple[str, ...] | None,
    when: Callable[..., Any] | None = None,
    **options: Any,
) -> Callable[[_Function], _Function]:
    """Mark a function as the replacement of one or more Keras functions."""
    # It is called with the original function, then with the result of `when` if there
    # is a condition, then with the arguments of the call. `when` may take the call's
    # first argument; if it returns None, only the original runs. `signature` is all
    # parameters, as `inspect.signature` writes them; or the names of those that the
    # patch relies on; or None for a property. `options` are other fields of a
    # `FunctionPatch`.
    attributes = (attribute,) if isinstance(attribute, str) else attribute

    def mark(function: _Function) -> _Function:
        patches = vars(function).setdefault(_PATCHES, [])
        for name in attributes:
            definers = (c for c in keras.Model.__mro__ if name in vars(c))
            home = next(definers, keras.Model) if owner is None else owner
            place = home, name, signature, function, when
            patches.append(FunctionPatch(*place, **options))
        return function

    return mark


# Marks the replacement of a model's methods in the class that defines them, mostly the
# backend's trainer: Keras compares a method with its base class's to detect user
# overrides.
model_hook = functools.partial(hook, None, owner_name="Model")


def keras_changed_error(target: str, what: str) -> KerasVersionError:
    """Return the error that refuses this version of Keras."""
    return KerasVersionError(
        f"Keras {keras.__version__} changed a function that keras_strategy patches: "
        f"`{target}` {what}. Please upgrade keras_strategy, or install a Keras version "
        "that it supports."
    )


def find_module(names: str, *modules: str) -> Any:
    """Return the first module that has all of the (space-separated) names."""
    wanted = names.split()
    missing = wanted
    for module in modules:
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            # An existing module that fails to import something else is an error.
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
            continue
        missing = [name for name in wanted if not hasattr(found, name)]
        if not missing:
            return found
    raise keras_changed_error(
        f"{modules[0]}.{missing[0]}", f"is gone: it is not in {' or '.join(modules)}"
    )


def patches_in(*modules: ModuleType) -> list[Patch]:
    """Return the patches that modules define, in the order of their definition."""
    found: list[Patch] = []
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, Patch):
                found.append(value)
            elif inspect.isfunction(value) and value.__module__ == module.__name__:
                found += getattr(value, _PATCHES, ())
    return found


def select_and_check(patches: Iterable[Patch]) -> list[Patch]:
    """Return the patches that this Keras needs, after checking each of them."""
    needed = [patch for patch in patches if patch.needed is None or patch.needed()]
    for patch in needed:
        patch.check()
    return needed


def install(patches: Iterable[Patch]) -> None:
    """Install the patches that this Keras needs; none if one of them does not fit."""
    for patch in select_and_check(patches):
        if patch.multi_replica_only or hasattr(patch.condition, _MULTI_REPLICA_ONLY):
            waiting.append(patch)
        else:
            patch.install()


waiting: list[Patch] = []  # for a strategy with several replicas


# Not wrapped: some patches call these hundreds of times per step.
in_replica = multi_replica_only(context.distributed_replica)
in_replica_or_dry_run = multi_replica_only(context.replica_or_dry_run)
in_scope = context.current_scope


@multi_replica_only
def before_apply() -> Any:
    """Return the running replica outside of `optimizer.apply`, or None."""
    replica = context.distributed_replica()
    return None if replica is None or replica.step.is_applying else replica


@multi_replica_only
def in_step() -> Any:
    """Return the running replica in a training step, or None."""
    replica = context.distributed_replica()
    return None if replica is None or replica.step.row_weight is None else replica


@multi_replica_only
def in_distributed_scope() -> Any:
    """Return the strategy of the current scope if it has several replicas, or None."""
    strategy = context.current_scope()
    if strategy is None or strategy.extended.topology.num_replicas == 1:
        return None
    return strategy


@multi_replica_only
def in_scope_of_workers() -> Any:
    """Return the strategy of the current scope if it has several workers, or None."""
    strategy = context.current_scope()
    return None if strategy is None or strategy.extended.cluster is None else strategy


@multi_replica_only
def model_on_replicas(model: Any) -> Any:
    """Return the model's strategy if it has several replicas, or None."""
    strategy = strategy_of_model(model)
    if strategy is None or strategy.extended.topology.num_replicas == 1:
        return None
    return strategy


@multi_replica_only
def model_on_workers(model: Any) -> Any:
    """Return the model's strategy if it has several workers, or None."""
    strategy = strategy_of_model(model)
    return None if strategy is None or strategy.extended.cluster is None else strategy
