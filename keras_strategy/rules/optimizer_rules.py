"""Dependencies of the updates of Keras's optimizers.

Subclasses of Keras's optimizers are unknown: only exact classes count.
"""

import functools
from typing import Any

import keras


def is_elementwise(optimizer: Any) -> bool:
    """Return True if an element's update uses that element's state alone."""
    return type(optimizer) in _classes(
        "SGD RMSprop Adam AdamW Adadelta Adagrad Adamax Nadam Ftrl Lion "
        "ScheduleFreeAdamW"
    )


def is_per_weight(optimizer: Any) -> bool:
    """Return True if a weight's update uses norms or products of it."""
    return type(optimizer) in _classes("Lamb Muon Adafactor")


def is_factored(optimizer: Any) -> bool:
    """Return True if an optimizer keeps sums of a weight's rows and columns."""
    return type(optimizer) in _classes("Adafactor")


@functools.cache
def _classes(names: str) -> frozenset[type]:
    """Return optimizer classes of this backend; some exist in newer Keras only."""
    classes = [getattr(keras.optimizers, name, None) for name in names.split()]
    return frozenset(type(cls.__new__(cls)) for cls in classes if cls is not None)
