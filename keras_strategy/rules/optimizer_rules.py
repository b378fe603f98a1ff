"""Of which weights Keras's optimizers compute the update of a weight."""

import functools
from typing import Any

import keras


def is_elementwise(optimizer: Any) -> bool:
    """Whether an optimizer updates an element of a weight by that element alone.

    By it, its gradient, and what the optimizer keeps of it. What a class derived from
    one of Keras's computes, it alone knows.

    Args:
        optimizer: The optimizer.
    """
    return type(optimizer) in _classes(
        "SGD RMSprop Adam AdamW Adadelta Adagrad Adamax Nadam Ftrl Lion "
        "ScheduleFreeAdamW"
    )


def is_weight_by_weight(optimizer: Any) -> bool:
    """Whether it computes norms of a weight, or products, and nothing of others.

    Args:
        optimizer: The optimizer.
    """
    return type(optimizer) in _classes("Lamb Muon Adafactor")


def is_factored(optimizer: Any) -> bool:
    """Whether it keeps sums of a weight's rows and columns.

    Args:
        optimizer: The optimizer.
    """
    return type(optimizer) in _classes("Adafactor")


@functools.cache
def _classes(names: str) -> frozenset[type]:
    """Optimizers as Keras makes them on this backend; some came later than others."""
    classes = [getattr(keras.optimizers, name, None) for name in names.split()]
    return frozenset(type(cls.__new__(cls)) for cls in classes if cls is not None)
