"""Which part of its variables a replica keeps, where a strategy's `shard` splits them.

A variable is split along one dimension into as many equal parts as there are replicas,
of which each keeps one. Which dimension follows from the shape alone, so that all
workers split alike.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from keras_strategy.rules.aggregation import is_on_read

logger = logging.getLogger("keras_strategy")

_SLOT, _DIMENSION = "_ks_slot", "_ks_split"
_making = threading.local()


def dimension_to_split(shape: Sequence[int], replicas: int) -> int | None:
    """The largest dimension that the replicas divide, the first of equal ones.

    Args:
        shape: The variable's shape.
        replicas: The number of replicas, over all workers.

    Returns:
        None if there is no such dimension: the variable stays whole on each of them.
    """
    fitting = [i for i, size in enumerate(shape) if size and size % replicas == 0]
    return max(fitting, key=lambda i: (shape[i], -i), default=None)


@contextlib.contextmanager
def making_slots() -> Iterator[None]:
    """Surrounds what makes variables of an optimizer."""
    before, _making.slots = is_making_slots(), True
    try:
        yield
    finally:
        _making.slots = before


def is_making_slots() -> bool:
    """Whether this thread is making variables of an optimizer."""
    return getattr(_making, "slots", False)


def note_slot(variable: Any) -> None:
    """Notes that a variable is an optimizer's, which may get its value later."""
    vars(variable)[_SLOT] = True


def note_split(variable: Any, dimension: int | None) -> None:
    """Notes along which dimension a variable is split; None if it is whole."""
    vars(variable)[_DIMENSION] = dimension


def split_dimension(variable: Any) -> int | None:
    """Along which dimension a variable is split; None if it is whole."""
    return vars(variable).get(_DIMENSION)


def is_split(variable: Any) -> bool:
    """Whether each replica keeps a part of a variable alone."""
    return split_dimension(variable) is not None


class Splitting:
    """What a strategy splits, and how.

    Args:
        shard: The strategy's argument.
        replicas: The number of replicas, over all workers.
    """

    def __init__(self, shard: str | None, replicas: int):
        self.shard, self.replicas = shard, replicas
        self._told = False

    def dimension(self, variable: Any) -> int | None:
        """Along which dimension a variable that is made now is to be split, or None.

        Args:
            variable: The variable, whose shape is known.
        """
        if self.shard is None or is_on_read(variable):
            return None
        slot = is_making_slots() or _SLOT in vars(variable)
        if not slot and not (variable.trainable and self.shard == "parameters"):
            return None
        shape = variable.shape
        dimension = dimension_to_split(shape, self.replicas)
        if dimension is None and len(shape) and not self._told:
            self._told = True
            logger.info(
                "shard='%s': %d replicas divide no dimension of a variable of the "
                "shape %s, which stays whole on each of them. "
                "`strategy.memory_report(model)` lists all such variables.",
                self.shard,
                self.replicas,
                tuple(shape),
            )
        return dimension
