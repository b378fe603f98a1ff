"""Cache of compiled functions, keyed by what they read.

A compiled program contains the Python values that its function read during tracing. An
entry is reused for the same function object if everything that it reads is unchanged,
and for another function of equal code that reads equal values.

A function *reads* what its code names: globals, enclosing variables, defaults, and
attributes of modules (`config.beta`); and what functions of its module or in its
closure read. Lists and dicts are searched. Attributes of other objects (`self.beta`)
are not: the same object counts as unchanged.
"""

import contextlib
import dis
import enum
import functools
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from operator import is_
from typing import Any, Generic, TypeVar

import numpy as np

from keras_strategy.errors import logger
from keras_strategy.values import value_key

T = TypeVar("T")

# Cached functions. An entry may hold a whole model, so old ones are evicted.
MAX_FUNCTIONS = 32
# Compiled programs of one function.
MAX_PROGRAMS = 32
# More programs than this suggest that a Python number changes in each call.
MANY_PROGRAMS = 8
# Compilations in a row, each used by one call only, before a warning.
_MAX_SINGLE_USES = 5

_MISSING = object()  # stands for a name that is not in a namespace, as builtins
_BUILTIN = (types.BuiltinFunctionType, np.ufunc, type(np.sum))
_CONTAINERS = (tuple, frozenset, list, set, dict)
# Longer containers are compared by identity: searching them takes too long.
_MAX_ITEMS = 1000
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_CELL = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")


class IdentityKey:
    """Key that compares an object by identity, and keeps it alive."""

    __slots__ = ("it",)

    def __init__(self, it: Any):
        self.it = it

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, IdentityKey) and self.it is other.it

    def __hash__(self) -> int:
        return id(self.it)


class FunctionFingerprint:
    """Fingerprint of what a function reads now; it does not keep the function alive."""

    # `key` is equal for functions of equal code that read equal values; mutable objects
    # are equal only if identical.

    def __init__(self, fn: Any, place: Any):
        # A hash and a description of each value, by name.
        self.described: dict[str, tuple[int, str]] = {}
        # A value that may change undetected: then the key is of this `place` only.
        self.changeable: str | None = None
        # Reads, and containers or dict views, with what to find there by identity.
        self._reads: list[tuple[Callable[[], Any], Any]] = []
        self._containers: list[tuple[Any, list]] = []
        self._seen: dict[int, int] = {}
        if isinstance(fn, types.FunctionType):
            self._seen[id(fn)] = 0
            key = self._function_key(weakref.proxy(fn))
        elif isinstance(fn, functools.partial):
            key = self._value_key("its arguments", fn)
        else:
            is_method = isinstance(fn, types.MethodType)
            key = self._value_key("", fn.__func__ if is_method else type(fn).__call__)
            # The cache finds the method by its object, which must not be kept alive.
            self.changeable = "the object whose method it is,"
        self.key = None if self.changeable is None else place, key

    def is_current(self) -> bool:
        """Return True if all that the function reads is unchanged; for every `run`."""
        try:
            for read, value in self._reads:
                if read() is not value:
                    return False
        except ValueError:  # a cell is empty
            return False
        for container, items in self._containers:
            if len(container) != len(items) or not all(map(is_, container, items)):
                return False
        return True

    def difference_from(self, previous: dict[str, tuple[int, str]]) -> str:
        """Return why a function was compiled again, for a message."""
        for name, (mark, text) in self.described.items():
            old_mark, old_text = previous.get(name, (mark, text))
            if mark == old_mark:
                continue
            if text == old_text:
                return f"`{name}`, {text}, differs from the previous call"
            return f"`{name}` was {old_text} in the previous call, and is {text} now"
        changeable = self.changeable or "what it reads"
        return f"it is a new function each time, and {changeable} may have changed"

    def _function_key(self, fn: Any, with_globals: bool = True) -> Any:
        code, home, label = fn.__code__, fn.__globals__, f"a default of {fn.__name__}"
        # Reloading a module in place changes the code of its functions.
        self._reads.append((functools.partial(getattr, fn, "__code__"), code))
        defaults = functools.partial(getattr, fn, "__defaults__")
        key = [code, self._read_key(label, defaults, {}, home, is_global=False)]
        if fn.__kwdefaults__:
            key.append(self._items_key(label, fn.__kwdefaults__))
        global_paths, cell_paths = _paths_in(code)
        for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
            read = functools.partial(getattr, cell, "cell_contents")
            path = cell_paths.get(name, {})
            key.append(self._read_key(name, read, path, home, is_global=False))
        for name, path in global_paths.items() if with_globals else ():
            read = functools.partial(home.get, name, _MISSING)
            key.append(self._read_key(name, read, path, home))
        return tuple(key)

    def _read_key(
        self, label: str, read: Callable, path: dict, home: dict, is_global: bool = True
    ) -> Any:
        """Return the key of what a function with the globals `home` reads."""
        try:
            value = read()
        except ValueError:  # the cell is empty
            value = _MISSING
        self._reads.append((read, value))
        if not isinstance(value, types.ModuleType):
            key = self._value_key(label, value, home if is_global else None)
            is_simple = value_key(value) is not None
            text = repr(value) if is_simple else f"a {type(value).__name__}"
            self.described[label] = hash(key), text
            return key
        keys: list[Any] = [IdentityKey(value)]
        for name, inner in path.items():
            if name is None:  # the module is used otherwise, too
                keys.append(self._object_key(label, value))
            else:
                read = functools.partial(vars(value).get, name, _MISSING)
                keys.append(self._read_key(f"{label}.{name}", read, inner, home))
        return tuple(keys)

    def _value_key(self, label: str, value: Any, home: dict | None = None) -> Any:
        """Return the key of a value; with `home`, ignore globals of other modules."""
        if (key := value_key(value)) is not None:
            return key
        kind: Any = type(value)
        if value is _MISSING or _is_immutable(kind, value):
            return IdentityKey(value)
        if id(value) in self._seen:
            return "seen", self._seen[id(value)]
        is_short = issubclass(kind, _CONTAINERS) and len(value) <= _MAX_ITEMS
        if is_short and issubclass(kind, tuple | frozenset):
            return kind, *(self._value_key(label, item) for item in value)
        self._seen[id(value)] = len(self._seen)
        if kind is types.FunctionType:
            return self._function_key(value, home is None or value.__globals__ is home)
        if kind is functools.partial:
            parts = (self._value_key(label, part) for part in (value.func, value.args))
            return kind, *parts, self._items_key(label, value.keywords)
        if is_short and kind in _CONTAINERS:
            return IdentityKey(value), self._items_key(label, value)
        return self._object_key(label, value)

    def _items_key(self, label: str, container: Any) -> Any:
        views = [container]
        if type(container) is dict:
            views.append(container.values())
        self._containers += [(view, list(view)) for view in views]
        return tuple(self._value_key(label, item) for view in views for item in view)

    def _object_key(self, label: str, value: Any) -> IdentityKey:
        if self.changeable is None:
            self.changeable = f"`{label}`, a {type(value).__name__},"
        return IdentityKey(value)


def _is_immutable(kind: Any, value: Any) -> bool:
    """Return True for enum members, builtin functions and builtin types."""
    if kind in _BUILTIN:  # but not for an object's method
        owner = getattr(value, "__self__", None)
        return owner is None or isinstance(owner, types.ModuleType)
    if issubclass(kind, type):
        return bool(value.__flags__ & (1 << 8))  # Py_TPFLAGS_IMMUTABLETYPE
    return issubclass(kind, enum.Enum)


@functools.lru_cache(maxsize=1024)
def _paths_in(code: types.CodeType) -> tuple[dict[str, dict], dict[str, dict]]:
    """Return trees of the globals, and of the closure variables, that code reads."""
    # Below a name are the attributes that are read from it, and None for other uses.
    paths: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    codes = [code]
    for part in codes:
        codes += [x for x in part.co_consts if isinstance(x, types.CodeType)]
        path: dict[Any, Any] | None = None
        for instruction in dis.get_instructions(part):
            operation, name = instruction.opname, instruction.argval
            if path is not None and operation in ("LOAD_ATTR", "LOAD_METHOD"):
                path = path.setdefault(name, {})
                continue
            if path is not None:
                path[None], path = {}, None
            if operation in _GLOBAL or operation in _CELL:
                path = paths[operation in _CELL].setdefault(name, {})
    return paths


@dataclass
class _Compilation:
    """Description of a compilation, with the first and the last call that used it."""

    described: dict[str, tuple[int, str]]
    first_call: int
    last_call: int
    single_uses: int = 1


@dataclass
class _Entry(Generic[T]):
    value: T
    key: Any
    compilation: _Compilation  # it outlives the value


class CompileCache(Generic[T]):
    """Least-recently-used cache of values, made by `make`, for functions."""

    def __init__(self, make: Callable[[], T]):
        self._make = make
        self._calls = 0
        # By `_place`; the last is a reference that keeps its `id` unique.
        self._known: dict[Any, tuple[FunctionFingerprint, _Entry[T], Any]] = {}
        self._entries: dict[Any, _Entry[T]] = {}
        self._compilations: dict[Any, _Compilation] = {}  # the last one of some code

    def get(self, fn: Callable[..., Any], to_compile: bool = True) -> T:
        """Return a function's value; without `to_compile` by identity alone."""
        place = _place(fn)
        known = self._known.get(place)
        if known is None or (to_compile and not known[0].is_current()):
            known = self._known[place] = self._look_up(fn, place, to_compile)
        self._calls += 1
        known[1].compilation.last_call = self._calls
        return known[1].value

    def refresh(self, fn: Callable[..., Any]) -> None:
        """Update the fingerprint after tracing, which may change what is read."""
        place = _place(fn)
        known = self._known.get(place)
        if known is None or known[0].is_current():
            return
        fingerprint, (_, entry, owner) = FunctionFingerprint(fn, place), known
        self._known[place] = fingerprint, entry, owner
        self._entries.pop(entry.key, None)
        entry.key, entry.compilation.described = fingerprint.key, fingerprint.described
        self._entries[entry.key] = entry

    def _look_up(self, fn: Any, place: Any, to_compile: bool) -> Any:
        fingerprint = FunctionFingerprint(fn, place)
        key, now = fingerprint.key, self._calls + 1
        entry = self._entries.get(key)
        if entry is None:
            if len(self._entries) >= MAX_FUNCTIONS:
                entries = list(self._entries.values())
                oldest = min(entries, key=lambda x: x.compilation.last_call)
                self._entries.pop(oldest.key, None)
                for other, (_, used, _) in list(self._known.items()):
                    if used is oldest:
                        self._known.pop(other, None)
            compilation = _Compilation(fingerprint.described, now, now)
            entry = self._entries[key] = _Entry(self._make(), key, compilation)
            if to_compile:
                self._record_compilation(fn, fingerprint, compilation)
        while len(self._known) >= 4 * MAX_FUNCTIONS:  # many equal functions
            self._known.pop(next(iter(self._known)), None)
        owner = fn.__self__ if type(fn) is types.MethodType else fn
        with contextlib.suppress(TypeError):  # without weak references it stays alive
            owner = weakref.ref(owner, lambda _: self._evict_place(place))
        return fingerprint, entry, owner

    # Evicts an object's own entries with it. The garbage collector may call this at any
    # time, so dicts are iterated as lists.
    def _evict_place(self, place: Any) -> None:
        self._known.pop(place, None)
        for key in list(self._entries):
            if key[0] == place:
                self._entries.pop(key, None)

    def _record_compilation(
        self, fn: Any, fingerprint: FunctionFingerprint, latest: _Compilation
    ) -> None:
        """Record a compilation; warn once if there is one in every call."""
        code = fn
        while isinstance(code, functools.partial):
            code = code.func
        code = getattr(code, "__code__", type(code))
        previous = self._compilations.pop(code, None)
        if len(self._compilations) >= MAX_FUNCTIONS:
            self._compilations.pop(next(iter(self._compilations)), None)
        self._compilations[code] = latest
        if previous is None:
            return
        was_warned = previous.single_uses >= _MAX_SINGLE_USES
        if was_warned or previous.first_call == previous.last_call:
            latest.single_uses = previous.single_uses + 1
        if latest.single_uses == _MAX_SINGLE_USES:
            logger.warning(
                "strategy.run compiles %r again in every call: %s. Define it once, "
                "before the loop, and pass what changes as an argument, numbers as "
                "arrays.",
                fn,
                fingerprint.difference_from(previous.described),
            )


def warn_many_programs(fn: Any, programs: int) -> None:
    logger.warning(
        "strategy.run has compiled %r for %d kinds of arguments. It does so for every "
        "new shape and every new Python number. Pass numbers that change as arrays.",
        fn,
        programs,
    )


def _place(fn: Callable[..., Any]) -> Any:
    # A bound method is a new object each time; its function and object are not.
    if type(fn) is types.MethodType:
        return id(fn.__self__), fn.__func__
    return id(fn), None
