"""Names of tf.distribute that do not exist here, with the reason."""

from typing import Any, NoReturn


class UnsupportedName:
    """Class attribute for a tf.distribute name that does not exist here.

    Reading it raises AttributeError, so `hasattr` is False.

    Args:
        reason: Why it does not exist, and what to use.
    """

    def __init__(self, reason: str):
        self.reason = reason
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> NoReturn:
        raise AttributeError(absent(owner.__name__, self._name, self.reason))


def absent(owner: str, name: str, reason: str) -> str:
    """Return the AttributeError message for a tf.distribute name."""
    return f"{owner!r} has no attribute {name!r}, which tf.distribute has. {reason}"
