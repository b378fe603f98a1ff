"""Gathered values of variables, for the worker that writes alone."""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

_held: ContextVar[dict[int, Any] | None] = ContextVar("held", default=None)


@contextlib.contextmanager
def variable_value_overrides(values: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Context manager in which variables read as the given values."""
    token = _held.set({id(variable): value for variable, value in values})
    try:
        yield
    finally:
        _held.reset(token)


def overridden_value(variable: Any) -> Any:
    """Return the value that overrides a variable's, or None."""
    values = _held.get()
    return None if values is None else values.get(id(variable))
