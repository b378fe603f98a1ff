"""Fingerprints of functions: what they read, and whether it has changed.

A compiled program has the Python values in it that its function read during tracing. A
function *reads* what its code names: globals, enclosing variables, defaults, and
attributes of modules (`config.beta`); and what functions of its module or in its
closure read. Lists and dicts are searched. Attributes of other objects (`self.beta`)
are not: the same object counts as unchanged.
"""

import dis
import enum
import functools
import types
from operator import is_
from typing import Any

import numpy as np

from keras_strategy.values.keys import value_key

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
