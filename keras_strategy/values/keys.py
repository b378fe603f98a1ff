"""Keys of Python values that a compiled program may treat as constants."""

from typing import Any

import numpy as np

# Objects of these types with equal values are indistinguishable.
_VALUE_TYPES = (type(None), bool, int, str, bytes, type(...), range)


def value_key(value: Any) -> Any:
    """Return a key that only indistinguishable values share, or None.

    `==` is not enough: True, 1 and 1.0 are equal, and so are 0.0 and -0.0. None means
    that the object is not known to be immutable.
    """
    kind: Any = type(value)
    if kind in _VALUE_TYPES or isinstance(value, np.dtype):
        return kind, value
    if kind in (float, complex) or issubclass(kind, np.generic):
        return kind, repr(value)  # 0.0 differs from -0.0, and nan equals nan
    return None


def is_same(value: Any, other: Any) -> bool:
    """Return True if two objects are identical or indistinguishable values."""
    if value is other:
        return True
    key = value_key(value)
    return key is not None and key == value_key(other)
