"""Fingerprints of functions: what they read, and whether it has changed.

A compiled program has the Python values in it that its function read during tracing. A
function *reads* what its code names: globals, enclosing variables, defaults, and
attributes of modules (`config.beta`); and what functions of its module or in its
closure read. Lists and dicts are searched. Attributes of other objects (`self.beta`)
are not: the same object counts as unchanged.

Cache of compiled functions.

A cached entry is reused for the same function object if everything that it reads is
unchanged, and for another function of equal code that reads equal values (see
`rules/reads.py`).
"""

import dis
import enum
import functools
import logging
import types
import weakref
from collections.abc import Callable
from operator import is_
from typing import Any, Generic, TypeVar

import numpy as np

from keras_strategy.values import value_key

# What a name stands for that is not there, as builtins are not.
_MISSING = object()
_BUILTIN = (types.BuiltinFunctionType, np.ufunc, type(np.sum))
_IMMUTABLE_TYPE = 1 << 8  # CPython's Py_TPFLAGS_IMMUTABLETYPE
# Longer ones are objects like any other: to look into them takes too long.
_LONG = 1000

_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_ENCLOSED = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")


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
    """Fingerprint of what a function reads now; it does not keep the function alive.

    Attributes:
        key: Equal for functions of equal code that read equal values. Mutable objects
            are equal only if identical.
        described: A hash and a description of each value, by name.
        changeable: A value that may change undetected, so that another function with it
            may differ; None if there is none.
    """

    def __init__(self, fn: Any):
        self.described: dict[str, tuple[int, str]] = {}
        self.changeable: str | None = None
        self._names: list[tuple[dict, str, Any]] = []
        self._cells: list[tuple[Any, Any]] = []
        self._functions: list[tuple[Any, Any, Any]] = []
        self._lists: list[tuple[Any, list]] = []
        self._dicts: list[tuple[dict, list, list]] = []
        self._seen: dict[int, int] = {}
        # Modules that are loaded again in place change the code of their functions.
        self._own: tuple[Any, Any] | None = None
        self.key = self._callable(fn)

    def is_current(self, fn: Any) -> bool:
        """Return True if everything that the function reads is unchanged.

        It runs in every `run`.
        """
        if self._own is not None:
            code, defaults = self._own
            if fn.__code__ is not code or fn.__defaults__ is not defaults:
                return False
        for namespace, name, value in self._names:
            if namespace.get(name, _MISSING) is not value:
                return False
        for cell, value in self._cells:
            try:
                if cell.cell_contents is not value:
                    return False
            except ValueError:  # it is empty
                if value is not _MISSING:
                    return False
        for function, code, defaults in self._functions:
            if function.__code__ is not code or function.__defaults__ is not defaults:
                return False
        for items, held in self._lists:
            if len(items) != len(held) or not all(map(is_, items, held)):
                return False
        for items, keys, values in self._dicts:
            if len(items) != len(keys) or not (
                all(map(is_, items, keys)) and all(map(is_, items.values(), values))
            ):
                return False
        return True

    def _callable(self, fn: Any) -> Any:
        if isinstance(fn, types.FunctionType):
            self._seen[id(fn)] = 0
            self._own = fn.__code__, fn.__defaults__
            return self._function(fn)
        if isinstance(fn, functools.partial):
            return self._value("its arguments", fn)
        if isinstance(fn, types.MethodType):
            key = self._value(fn.__name__, fn.__func__)
        else:
            key = self._value("__call__", type(fn).__call__)
        # Its object is what it is found by, and is not kept alive here.
        self.changeable = "the object whose method it is,"
        return key

    def _function(self, fn: types.FunctionType, names: bool = True) -> Any:
        """Return the key of a function; `names` includes its globals."""
        key: list[Any] = [fn.__code__]
        of_globals, of_cells = _names_in(fn.__code__)
        label = f"a default of {fn.__name__}"
        key.append(self._noted(label, fn.__defaults__))
        if fn.__kwdefaults__:
            key.append(self._items(label, fn.__kwdefaults__))
        free = fn.__code__.co_freevars
        for name, cell in zip(free, fn.__closure__ or (), strict=True):
            value = _content(cell)
            self._cells.append((cell, value))
            path = of_cells.get(name)
            if isinstance(value, types.ModuleType) and path is not None:
                key.append(self._module(name, value, path, fn.__globals__))
            else:
                key.append(self._noted(name, value))
        for name, path in of_globals.items() if names else ():
            key.append(self._name(name, fn.__globals__, name, path, fn.__globals__))
        return tuple(key)

    def _name(
        self, label: str, namespace: dict, name: str, path: dict, home: dict
    ) -> Any:
        """Return the key of a name's value.

        `label` is its name in messages, `path` the attributes read from it (see
        `_names_in`), `home` the globals of the function that reads it.
        """
        value = namespace.get(name, _MISSING)
        self._names.append((namespace, name, value))
        if isinstance(value, types.ModuleType):
            return self._module(label, value, path, home)
        return self._noted(label, value, home)

    def _module(
        self, label: str, module: types.ModuleType, path: dict, home: dict
    ) -> Any:
        key = [
            self._name(f"{label}.{name}", vars(module), name, below, home)
            for name, below in path.items()
            if name is not None
        ]
        if None in path:
            key.append(self._object(label, module))
        return IdentityKey(module), *key

    def _noted(self, label: str, value: Any, home: dict | None = None) -> Any:
        """Return the key of a value and describe it."""
        key = self._value(label, value, home)
        simple = value_key(value) is not None
        text = repr(value) if simple else f"a {type(value).__name__}"
        self.described[label] = hash(key), text
        return key

    def _value(self, label: str, value: Any, home: dict | None = None) -> Any:
        """Return the key of a value.

        Functions whose globals are not `home` are compared by code alone; None includes
        all.
        """
        key = value_key(value)
        if key is not None:
            return key
        kind: Any = type(value)
        if value is _MISSING:
            return kind, value
        if _cannot_change(kind, value):
            return IdentityKey(value)
        if id(value) in self._seen:
            return "seen", self._seen[id(value)]
        if issubclass(kind, tuple | frozenset) and len(value) <= _LONG:
            return kind, *(self._value(label, item) for item in value)
        self._seen[id(value)] = len(self._seen)
        if kind is types.FunctionType:
            self._functions.append((value, value.__code__, value.__defaults__))
            own = home is None or value.__globals__ is home
            return self._function(value, names=own)
        if kind is functools.partial:
            parts = (self._value(label, part) for part in (value.func, value.args))
            return kind, *parts, self._items(label, value.keywords)
        if kind in (list, set) and len(value) <= _LONG:
            held = list(value)
            self._lists.append((value, held))
            return IdentityKey(value), *(self._value(label, item) for item in held)
        if kind is dict and len(value) <= _LONG:
            return IdentityKey(value), self._items(label, value)
        return self._object(label, value)

    def _items(self, label: str, items: dict) -> Any:
        """Return the key of a dict's content, for any dict."""
        keys, values = list(items), list(items.values())
        self._dicts.append((items, keys, values))
        return tuple(self._value(label, part) for part in (*keys, *values))

    def _object(self, label: str, value: Any) -> IdentityKey:
        """Return the key of an object that may change undetected."""
        if self.changeable is None:
            self.changeable = f"`{label}`, a {type(value).__name__},"
        return IdentityKey(value)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return _MISSING


def _cannot_change(kind: Any, value: Any) -> bool:
    """Return True for enum members, builtin functions and builtin types."""
    if kind in _BUILTIN:  # and not the method of an object
        owner = getattr(value, "__self__", None)
        return owner is None or isinstance(owner, types.ModuleType)
    if issubclass(kind, type):
        return bool(value.__flags__ & _IMMUTABLE_TYPE)
    return issubclass(kind, enum.Enum)


@functools.lru_cache(maxsize=1024)
def _names_in(code: types.CodeType) -> tuple[dict[str, dict], dict[str, dict]]:
    """Return the globals and closure variables that code and nested code read.

    Both are trees of names and the attributes read from them. A key None means that the
    object is used otherwise, too.
    """
    of_globals: dict[str, Any] = {}
    of_cells: dict[str, Any] = {}
    path: dict[Any, Any] | None = None
    for instruction in dis.get_instructions(code):
        if path is not None and instruction.opname in _ATTRIBUTE:
            path = path.setdefault(instruction.argval, {})
            continue
        if path is not None:
            path[None] = {}
            path = None
        if instruction.opname in _GLOBAL:
            path = of_globals.setdefault(instruction.argval, {})
        elif instruction.opname in _ENCLOSED:
            path = of_cells.setdefault(instruction.argval, {})
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            for mine, inner in zip(
                (of_globals, of_cells), _names_in(constant), strict=True
            ):
                _merge(mine, inner)
    return of_globals, of_cells


def _merge(tree: dict, other: dict) -> None:
    for name, below in other.items():
        _merge(tree.setdefault(name, {}), below)


logger = logging.getLogger("keras_strategy")
T = TypeVar("T")

# Functions that are kept compiled. One may hold a whole model, so old ones must go.
MAX_FUNCTIONS = 32
# Programs of one function that are kept compiled.
MAX_PROGRAMS = 32
# Beyond so many programs of one function, its Python numbers are suspected.
MANY_PROGRAMS = 8
# So often in a row a function is compiled for one call alone before that is said.
_IN_A_ROW = 5


class CompileCache(Generic[T]):
    """Least-recently-used cache of values for functions.

    Entries that only one object can find are evicted with that object. `make` creates
    an entry's value.
    """

    def __init__(self, make: Callable[[], T]):
        self._make = make
        self._calls = 0
        self._known: dict[Any, _Known[T]] = {}
        self._kept: dict[Any, _Kept[T]] = {}
        self._compiled: dict[Any, _Compiled] = {}

    def get(self, fn: Callable[..., Any], to_compile: bool = True) -> T:
        """Return a function's value; without `to_compile` by identity alone."""
        place = _place(fn)
        known = self._known.get(place)
        if known is None or (to_compile and not known.reads.is_current(fn)):
            known = self._look_at(fn, place, to_compile)
        self._calls += 1
        known.kept.uses.last = self._calls
        return known.kept.value

    def refresh(self, fn: Callable[..., Any]) -> None:
        """Update the fingerprint after a function ran as Python.

        Tracing may change what it reads, such as a counter or a lazily made object.
        """
        known = self._known.get(_place(fn))
        if known is None or known.reads.is_current(fn):
            return
        known.reads = FunctionFingerprint(fn)
        compiled = self._compiled.get(_code(fn))
        if compiled is not None:
            compiled.described = known.reads.described
        kept = known.kept
        self._kept.pop(kept.key, None)
        kept.key = _key(_place(fn), known.reads)
        self._kept[kept.key] = kept

    def _look_at(
        self, fn: Callable[..., Any], place: Any, to_compile: bool
    ) -> "_Known[T]":
        reads = FunctionFingerprint(fn)
        key = _key(place, reads)
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) >= MAX_FUNCTIONS:
                self._drop(min(list(self._kept.values()), key=lambda x: x.uses.last))
            kept = self._kept[key] = _Kept(self._make(), key, _Uses(self._calls + 1))
            if to_compile:
                self._note(fn, reads, kept.uses)
        while len(self._known) >= 4 * MAX_FUNCTIONS:  # functions that are all the same
            self._known.pop(next(iter(self._known)), None)
        known = _Known(reads, kept, self._alive(fn, place))
        self._known[place] = known
        return known

    def _alive(self, fn: Callable[..., Any], place: Any) -> Any:
        """Return a weak reference that evicts a function with its owner."""
        owner = fn.__self__ if type(fn) is types.MethodType else fn
        try:
            return weakref.ref(owner, lambda _: self._forget(place))
        except TypeError:  # then it must stay, or another could have its id
            return owner

    def _forget(self, place: Any) -> None:
        self._known.pop(place, None)
        # Others' too: Python calls this whenever it likes, and only lists are safe.
        for key in list(self._kept):
            if key[0] == place:
                self._kept.pop(key, None)

    def _drop(self, kept: "_Kept[T]") -> None:
        self._kept.pop(kept.key, None)
        for place in list(self._known):
            known = self._known.get(place)
            if known is not None and known.kept is kept:
                self._known.pop(place, None)

    def _note(
        self, fn: Callable[..., Any], reads: FunctionFingerprint, uses: "_Uses"
    ) -> None:
        """Record a compilation; warn if there is one in every call."""
        code = _code(fn)
        before = self._compiled.pop(code, None)
        while len(self._compiled) >= MAX_FUNCTIONS:
            self._compiled.pop(next(iter(self._compiled)), None)
        now = self._compiled[code] = _Compiled(uses, reads.described)
        if before is None:
            return
        now.warned = before.warned
        if before.uses.last == before.uses.first:
            now.in_a_row = before.in_a_row + 1
        if now.in_a_row >= _IN_A_ROW and not now.warned:
            now.warned = True
            logger.warning(
                "strategy.run compiles %r anew in every call: %s. Define it "
                "once, before the loop, and give it what changes as an argument, "
                "numbers as arrays.",
                fn,
                _reason(before.described, reads),
            )


def warn_many_programs(fn: Any, programs: int) -> None:
    """Warn that one function was compiled for many kinds of arguments."""
    logger.warning(
        "strategy.run has compiled %r for %d kinds of arguments. It does so for every "
        "new shape and every new Python number; give it numbers that change as arrays.",
        fn,
        programs,
    )


class _Uses:
    """Numbers of the first and the last call that used an entry."""

    __slots__ = ("first", "last")

    def __init__(self, first: int):
        self.first = self.last = first


class _Kept(Generic[T]):
    """Entry for all functions that are equal."""

    __slots__ = ("key", "uses", "value")

    def __init__(self, value: T, key: Any, uses: _Uses):
        self.value = value
        self.key = key
        self.uses = uses


class _Known(Generic[T]):
    """Function object seen before."""

    __slots__ = ("alive", "kept", "reads")

    def __init__(self, reads: FunctionFingerprint, kept: _Kept[T], alive: Any):
        self.reads = reads
        self.kept = kept
        self.alive = alive


class _Compiled:
    """Last compilation of some code, and what it read."""

    def __init__(self, uses: _Uses, described: dict[str, tuple[int, str]]):
        self.uses = uses
        self.described = described
        self.in_a_row = 1
        self.warned = False


def _place(fn: Callable[..., Any]) -> Any:
    """Return the key that finds the same function object again."""
    # A bound method is a new object each time; its function and object are not.
    if type(fn) is types.MethodType:
        return id(fn.__self__), fn.__func__
    return id(fn), None


def _key(place: Any, reads: FunctionFingerprint) -> Any:
    return None if reads.changeable is None else place, reads.key


def _code(fn: Any) -> Any:
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = getattr(fn, "__func__", fn)
    return getattr(fn, "__code__", type(fn))


def _reason(before: dict[str, tuple[int, str]], reads: FunctionFingerprint) -> str:
    """Return why a function differs from the previous one, for a message."""
    for name, (mark, text) in reads.described.items():
        mark_before, text_before = before.get(name, (mark, text))
        if mark == mark_before:
            continue
        if text == text_before:
            return f"`{name}`, {text}, is not what it was in the call before"
        return f"`{name}` was {text_before} in the call before, and is {text}"
    changeable = reads.changeable or "what it reads"
    return (
        "it is a new function each time, and "
        f"{changeable} may have changed since the one before"
    )
