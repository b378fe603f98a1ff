"""Names of tf.distribute that have no meaning here, and say so."""

from typing import Any, NoReturn


class Refused:
    """Stands for such a name in a class.

    To read it is an AttributeError, so that `hasattr` tells the truth.

    Args:
        reason: Why, and what to use.
    """

    def __init__(self, reason: str):
        self.reason = reason
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> NoReturn:
        raise AttributeError(absent(owner.__name__, self._name, self.reason))


def absent(owner: str, name: str, reason: str) -> str:
    """The message of the AttributeError.

    Args:
        owner: A class or a module.
        name: What was looked for in it.
        reason: Why it is not there, and what to use.
    """
    return f"{owner!r} has no attribute {name!r}, which tf.distribute has. {reason}"
