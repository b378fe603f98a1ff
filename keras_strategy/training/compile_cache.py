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
import logging
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from operator import is_
from typing import Any, Generic, TypeVar

import numpy as np

from keras_strategy.values import value_key

logger = logging.getLogger("keras_strategy")
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
_IMMUTABLE_TYPE = 1 << 8  # CPython's Py_TPFLAGS_IMMUTABLETYPE
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
        # Names, other reads, containers or dict views; compared by identity. Names are
        # most of them, and a loop over namespaces is faster than over functions.
        self._names: list[tuple[dict, str, Any]] = []
        self._reads: list[tuple[Callable[[], Any], Any]] = []
        self._containers: list[tuple[Any, list]] = []
        self._seen: dict[int, int] = {}
        # Reloading a module in place changes the code of its functions.
        self._code: tuple[Any, ...] = ()
        self.key = self._callable_key(fn)

    def is_current(self, fn: Any) -> bool:
        """Return True if everything that the function reads is unchanged.

        It runs in every `run`.
        """
        if self._code:
            code, defaults = self._code
            if fn.__code__ is not code or fn.__defaults__ is not defaults:
                return False
        for namespace, name, value in self._names:
            if namespace.get(name, _MISSING) is not value:
                return False
        try:
            for read, value in self._reads:
                if read() is not value:
                    return False
        except ValueError:  # a cell has become empty
            return False
        for container, items in self._containers:
            if len(container) != len(items) or not all(map(is_, container, items)):
                return False
        return True

    def _callable_key(self, fn: Any) -> Any:
        if isinstance(fn, types.FunctionType):
            self._seen[id(fn)] = 0
            self._code = fn.__code__, fn.__defaults__
            return self._function_key(fn)
        if isinstance(fn, functools.partial):
            return self._value_key("its arguments", fn)
        if isinstance(fn, types.MethodType):
            key = self._value_key(fn.__name__, fn.__func__)
        else:
            key = self._value_key("__call__", type(fn).__call__)
        # The cache finds the method by its object, which must not be kept alive here.
        self.changeable = "the object whose method it is,"
        return key

    def _function_key(self, fn: types.FunctionType, with_globals: bool = True) -> Any:
        global_paths, cell_paths = _paths_in(fn.__code__)
        label, home = f"a default of {fn.__name__}", fn.__globals__
        key = [fn.__code__, self._read_key(label, fn.__defaults__)]
        if fn.__kwdefaults__:
            key.append(self._items_key(label, fn.__kwdefaults__))
        names = fn.__code__.co_freevars
        for name, cell in zip(names, fn.__closure__ or (), strict=True):
            value, path = _cell_contents(cell), cell_paths.get(name)
            read = functools.partial(getattr, cell, "cell_contents")
            if value is _MISSING:
                read = functools.partial(_cell_contents, cell)
            self._reads.append((read, value))
            is_module = isinstance(value, types.ModuleType) and path is not None
            key.append(self._read_key(name, value, home if is_module else None, path))
        for name, path in global_paths.items() if with_globals else ():
            key.append(self._name_key(name, home, name, home, path))
        return tuple(key)

    def _name_key(
        self, label: str, namespace: dict, name: str, home: dict, path: dict
    ) -> Any:
        value = namespace.get(name, _MISSING)
        self._names.append((namespace, name, value))
        return self._read_key(label, value, home, path)

    def _read_key(
        self, label: str, value: Any, home: dict | None = None, path: dict | None = None
    ) -> Any:
        """Return the key of a value, and describe it.

        `label` is its name in messages, `home` the globals of the function that reads
        it, and `path` the attributes that it reads from a module (see `_paths_in`).
        """
        if isinstance(value, types.ModuleType) and home is not None:
            key: list[Any] = [IdentityKey(value)]
            for name, inner in (path or {}).items():
                if name is None:
                    key.append(self._object_key(label, value))
                else:
                    full, names = f"{label}.{name}", vars(value)
                    key.append(self._name_key(full, names, name, home, inner))
            return tuple(key)
        key = self._value_key(label, value, home)
        simple = value_key(value) is not None
        text = repr(value) if simple else f"a {type(value).__name__}"
        self.described[label] = hash(key), text
        return key

    def _value_key(self, label: str, value: Any, home: dict | None = None) -> Any:
        """Return the key of a value; without `home` that of functions has globals."""
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
            for name in ("__code__", "__defaults__"):
                read = functools.partial(getattr, value, name)
                self._reads.append((read, read()))
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


def _cell_contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return _MISSING


def _is_immutable(kind: Any, value: Any) -> bool:
    """Return True for enum members, builtin functions and builtin types."""
    if kind in _BUILTIN:  # but not for an object's method
        owner = getattr(value, "__self__", None)
        return owner is None or isinstance(owner, types.ModuleType)
    if issubclass(kind, type):
        return bool(value.__flags__ & _IMMUTABLE_TYPE)
    return issubclass(kind, enum.Enum)


@functools.lru_cache(maxsize=1024)
def _paths_in(code: types.CodeType) -> tuple[dict[str, dict], dict[str, dict]]:
    """Return the globals and closure variables that code and nested code read.

    Both are trees of names and the attributes read from them. A key None means that the
    object is used otherwise, too.
    """
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


@dataclass(slots=True)
class _Entry(Generic[T]):
    """Value of equal functions, with the first and the last call that used it."""

    value: T
    key: Any
    calls: list[int]


@dataclass
class _Compilation:
    """Last compilation of some code, without a reference to the entry's value."""

    calls: list[int]
    described: dict[str, tuple[int, str]]
    single_uses: int = 1
    warned: bool = False


class CompileCache(Generic[T]):
    """Least-recently-used cache of values, made by `make`, for functions.

    Entries that only one object can find are evicted with that object.
    """

    def __init__(self, make: Callable[[], T]):
        self._make = make
        self._calls = 0
        # By function object; the last is a reference that keeps its `id` unique.
        self._known: dict[Any, tuple[FunctionFingerprint, _Entry[T], Any]] = {}
        self._entries: dict[Any, _Entry[T]] = {}
        self._compilations: dict[Any, _Compilation] = {}

    def get(self, fn: Callable[..., Any], to_compile: bool = True) -> T:
        """Return a function's value; without `to_compile` by identity alone."""
        place = _place(fn)
        known = self._known.get(place)
        if known is None or (to_compile and not known[0].is_current(fn)):
            known = self._known[place] = self._look_up(fn, place, to_compile)
        self._calls += 1
        known[1].calls[1] = self._calls
        return known[1].value

    def refresh(self, fn: Callable[..., Any]) -> None:
        """Update the fingerprint after a function ran as Python.

        Tracing may change what it reads, such as a counter or a lazily made object.
        """
        place = _place(fn)
        known = self._known.get(place)
        if known is None or known[0].is_current(fn):
            return
        fingerprint, (_, entry, owner) = FunctionFingerprint(fn), known
        self._known[place] = fingerprint, entry, owner
        if (compilation := self._compilations.get(_code(fn))) is not None:
            compilation.described = fingerprint.described
        self._entries.pop(entry.key, None)
        entry.key = _entry_key(place, fingerprint)
        self._entries[entry.key] = entry

    def _look_up(self, fn: Any, place: Any, to_compile: bool) -> Any:
        fingerprint = FunctionFingerprint(fn)
        key = _entry_key(place, fingerprint)
        entry = self._entries.get(key)
        if entry is None:
            if len(self._entries) >= MAX_FUNCTIONS:
                self._evict(min(list(self._entries.values()), key=lambda x: x.calls[1]))
            calls = [self._calls + 1] * 2
            entry = self._entries[key] = _Entry(self._make(), key, calls)
            if to_compile:
                self._record_compilation(fn, fingerprint, calls)
        while len(self._known) >= 4 * MAX_FUNCTIONS:  # many equal functions
            self._known.pop(next(iter(self._known)), None)
        owner = fn.__self__ if type(fn) is types.MethodType else fn
        with contextlib.suppress(TypeError):  # without weak references it stays alive
            owner = weakref.ref(owner, lambda _: self._evict_place(place))
        return fingerprint, entry, owner

    # The garbage collector may call this at any time: dicts are iterated as lists.
    def _evict_place(self, place: Any) -> None:
        self._known.pop(place, None)
        for key in list(self._entries):
            if key[0] == place:
                self._entries.pop(key, None)

    def _evict(self, entry: _Entry[T]) -> None:
        self._entries.pop(entry.key, None)
        for place in list(self._known):
            known = self._known.get(place)
            if known is not None and known[1] is entry:
                self._known.pop(place, None)

    def _record_compilation(
        self, fn: Any, fingerprint: FunctionFingerprint, calls: list[int]
    ) -> None:
        """Record a compilation; warn if there is one in every call."""
        latest = _Compilation(calls, fingerprint.described)
        previous = self._compilations.pop(_code(fn), latest)
        while len(self._compilations) >= MAX_FUNCTIONS:
            self._compilations.pop(next(iter(self._compilations)), None)
        self._compilations[_code(fn)] = latest
        latest.warned = previous.warned
        if previous is not latest and previous.calls[0] == previous.calls[1]:
            latest.single_uses = previous.single_uses + 1
        if latest.single_uses >= _MAX_SINGLE_USES and not latest.warned:
            latest.warned = True
            logger.warning(
                "strategy.run compiles %r again in every call: %s. Define it once, "
                "before the loop, and pass what changes as an argument, numbers as "
                "arrays.",
                fn,
                _difference(previous.described, fingerprint),
            )


def warn_many_programs(fn: Any, programs: int) -> None:
    """Warn that one function was compiled for many kinds of arguments."""
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


def _entry_key(place: Any, fingerprint: FunctionFingerprint) -> Any:
    return None if fingerprint.changeable is None else place, fingerprint.key


def _code(fn: Any) -> Any:
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = getattr(fn, "__func__", fn)
    return getattr(fn, "__code__", type(fn))


def _difference(
    previous: dict[str, tuple[int, str]], fingerprint: FunctionFingerprint
) -> str:
    for name, (mark, text) in fingerprint.described.items():
        previous_mark, previous_text = previous.get(name, (mark, text))
        if mark == previous_mark:
            continue
        if text == previous_text:
            return f"`{name}`, {text}, differs from the previous call"
        return f"`{name}` was {previous_text} in the previous call, and is {text} now"
    changeable = fingerprint.changeable or "what it reads"
    return f"it is a new function each time, and {changeable} may have changed"
