"""Values that all workers have read, for the one that goes on alone."""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

_held: ContextVar[dict[int, Any] | None] = ContextVar("held", default=None)


@contextlib.contextmanager
def held(values: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Surrounds what reads variables that have the values that all workers have read.

    Args:
        values: Variables, of which each replica has its part, and their values.
    """
    token = _held.set({id(variable): value for variable, value in values})
    try:
        yield
    finally:
        _held.reset(token)


def held_value(variable: Any) -> Any:
    """The value that is held of a variable, or None."""
    values = _held.get()
    return None if values is None else values.get(id(variable))
