"""Cache of compiled functions.

A cached entry is reused for the same function object if everything that it reads is
unchanged, and for another function of equal code that reads equal values (see
`rules/reads.py`).
"""

import functools
import logging
import types
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from keras_strategy.rules.reads import FunctionFingerprint

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

    def _note(self, fn: Callable[..., Any], reads: FunctionFingerprint, uses: "_Uses") -> None:
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
