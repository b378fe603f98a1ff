"""When a Python value is the same as another one, for a program that it is part of."""

from typing import Any

import numpy as np

# No object of these types can be told from another one of equal value.
_VALUES = (type(None), bool, int, str, bytes, type(...), range)


def value_key(value: Any) -> Any:
    """A key that other values have only if nothing can tell them from this one.

    Python's `==` does not say that: True, 1 and 1.0 are equal, and so are 0.0 and -0.0.

    Args:
        value: Any object.

    Returns:
        The key; None for what is not known to be a value that stays as it is.
    """
    kind: Any = type(value)
    if kind in _VALUES or isinstance(value, np.dtype):
        return kind, value
    if kind in (float, complex) or issubclass(kind, np.generic):
        return kind, repr(value)  # 0.0 is not -0.0, and nan is nan
    return None


def is_same(value: Any, other: Any) -> bool:
    """Whether two objects are one, or values that nothing can tell apart."""
    if value is other:
        return True
    key = value_key(value)
    return key is not None and key == value_key(other)
