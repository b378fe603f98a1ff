"""What is known of the array that a variable holds, noted beside the variable."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

_NAME = "_ks_mark"
_noted: Callable[[Any], Any] = attrgetter(_NAME)

# A reference to no array.
nothing: Callable[[], Any] = object


class Mark:
    """What is known of an array that a variable holds.

    The references are weak, and say nothing of another array that the variable may
    have been given since.

    Attributes:
        placed: Gives the array if it has the layout that programs need.
        own: Gives it if a program made it for this variable and nobody has read it
            since.
    """

    __slots__ = ("own", "placed")

    def __init__(self):
        self.own: Callable[[], Any] = nothing
        self.placed: Callable[[], Any] = nothing


def of(variables: Sequence[Any]) -> list[Mark]:
    """The marks of variables."""
    try:
        return list(map(_noted, variables))
    except AttributeError:  # one has none yet
        return [vars(v).setdefault(_NAME, Mark()) for v in variables]


def lend(variable: Any) -> None:
    """Notes that others may hold the variable's array from now on, or a part of it."""
    mark = vars(variable).get(_NAME)
    if mark is not None:
        mark.own = nothing


def forget(variable: Any) -> None:
    """Notes that nothing is known."""
    vars(variable).pop(_NAME, None)
