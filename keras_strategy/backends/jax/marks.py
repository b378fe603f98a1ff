"""What is known of the array that a variable holds, noted beside the variable."""

from typing import Any

NAME = "_ks_mark"


class Mark:
    """What is known of an array that a variable holds.

    Attributes:
        array: A weak reference to it: the variable may have been given another one
            since, of which nothing is known.
        own: Whether a program made it for this variable and nobody has read it since.
    """

    __slots__ = ("array", "own")

    def __init__(self, array: Any, own: bool):
        self.array = array
        self.own = own


def lend(variable: Any) -> None:
    """Notes that others may hold the variable's array from now on, or a part of it."""
    mark = vars(variable).get(NAME)
    if mark is not None:
        mark.own = False


def forget(variable: Any) -> None:
    """Notes that nothing is known."""
    vars(variable).pop(NAME, None)
