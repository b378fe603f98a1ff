"""Arrays of variables: donation, sync-on-read values and local shards.

A compiled program computes new values in the memory of the old ones (JAX donation),
which deletes the arrays it received. It may donate an array only if a program created
it for that variable and nobody has read it since: a reader of `variable.value` may keep
the array, or something that shares its memory, such as a shard or a result of
`jax.device_put`. Every other array is copied first. That happens once, since the
program's output can be donated again. `ArrayNote` records this.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

_NOTE = "_ks_array_note"
_get_note: Callable[[Any], Any] = attrgetter(_NOTE)

# A reference that equals no array.
no_array: Callable[[], Any] = object


class ArrayNote:
    """Facts about the array that a variable holds.

    Weak references, which do not match an array that the variable received later.

    Attributes:
        placed: Returns the array if it has the sharding that programs need.
        donatable: Returns the array if a program may donate it.
    """

    __slots__ = ("donatable", "placed")

    def __init__(self):
        self.donatable: Callable[[], Any] = no_array
        self.placed: Callable[[], Any] = no_array


def array_notes(variables: Sequence[Any]) -> list[ArrayNote]:
    """Return the notes of variables."""
    try:
        return list(map(_get_note, variables))
    except AttributeError:  # a variable without a note
        return [vars(v).setdefault(_NOTE, ArrayNote()) for v in variables]


def forbid_donation(variable: Any) -> None:
    """Record that other code may hold the variable's array or a part of it."""
    note = vars(variable).get(_NOTE)
    if note is not None:
        note.donatable = no_array


def discard_note(variable: Any) -> None:
    """Remove the note of the variable."""
    vars(variable).pop(_NOTE, None)
