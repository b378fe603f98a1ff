"""How a function is tried on rows of a batch, and what is said of it.

What a trial assigns and draws is forgotten. A function that asks for its replica knows
of the others, and what draws numbers that Keras's seeds do not decide cannot be
compared: neither is judged.
"""

import logging
import weakref
from collections.abc import Callable
from typing import Any

import keras
from keras import ops, tree

from keras_strategy.core.context import dry_run_scope
from keras_strategy.core.own_attributes import discard_attribute_changes
from keras_strategy.core.random_states import preserve_random_states

logger = logging.getLogger("keras_strategy")

# Of what is smaller than this, all is rounding.
_SMALL = 1e-2

# What was tried of each object.
_tried: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
GATHER = "`ks.get_replica_context().all_gather(x, axis=0)`"


def warn_once(tried: Any, message: str) -> Callable[[], None]:
    """Warns once of an object, which may be tried in training and else."""
    of = weakref.ref(tried)

    def warn():
        if (found := of()) is not None and is_new(found, message):
            logger.warning(message)

    return warn


def is_new(tried: Any, name: str) -> bool:
    """Whether something is to be tried, or said, which it is once."""
    names = _tried.setdefault(tried, set())
    if name in names:
        return False
    names.add(name)
    return True


def check_rows(check: Callable[..., Any], structure: Any, *args: Any) -> Any:
    """Whether something holds; True where that cannot be told. See `told`."""
    found = check_rows_if_possible(check, structure, *args)
    return True if found is None else found


def check_rows_if_possible(check: Callable[..., Any], structure: Any, *args: Any) -> Any:
    """Whether something holds; None where that cannot be told.

    Args:
        check: Called with the trial, with some rows, with the first and the second
            half of them, and with `args`.
        structure: Of tensors with the replica's rows.
        args: See `check`.

    Returns:
        A boolean, or a scalar tensor.
    """
    parts, enough = split_in_halves(structure)
    if not parts:
        return None
    try:
        with (
            preserve_random_states(),
            dry_run_scope() as trial,
            discard_attribute_changes(),
            keras.StatelessScope(),
        ):
            trial.tests_row_independence = True
            found = check(trial, *parts, *args)
    except Exception:
        # Some functions take a batch of a certain size alone, or make a variable.
        logger.debug("No trial of a function by rows.", exc_info=True)
        return None
    if trial.depends_on_replicas or trial.drew_random:
        return None
    return ops.logical_or(found, ops.logical_not(enough))


def split_in_halves(structure: Any) -> tuple[list[Any], Any]:
    """Some rows of a structure, the first and the second half of them.

    Returns:
        The three structures, none if there are no rows to divide; and whether there
        are enough of them, a scalar tensor where that is not known.
    """
    leaves = [x for x in tree.flatten(structure) if has_rows(x)]
    if len({x.shape[0] for x in leaves}) != 1:
        return [], False
    rows = ops.shape(leaves[0])[0]
    if isinstance(rows, int):
        half, second, enough = rows // 2, rows // 2, rows >= 2
        if not enough:
            return [], False
    else:
        half, enough = ops.maximum(rows // 2, 1), rows >= 2
        second = ops.minimum(half, rows - 1)

    def part(begin, end):
        return tree.map_structure(
            lambda x: x[begin:end] if has_rows(x) else x, structure
        )

    return [part(0, second + half), part(0, half), part(second, second + half)], enough


def forgetting(fn: Callable[[Any], Any], rows: Any) -> Any:
    """What a function gives; the next call begins with the same seeds as this one."""
    with keras.StatelessScope():
        return fn(rows)


class DiscardUpdates(keras.StatelessScope):
    """Where what is assigned is forgotten at once, and metrics have no rows."""

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Forgets it."""


def has_rows(x: Any) -> bool:
    """Whether it is an array with a dimension that may be the rows."""
    return len(getattr(x, "shape", ())) > 0


def is_close(a: Any, b: Any, tolerance: float) -> Any:
    """Whether two tensors are equal, relative to the largest entry."""
    a, b = (ops.cast(ops.convert_to_tensor(x), "float32") for x in (a, b))
    size = ops.max(ops.where(ops.isfinite(a), ops.abs(a), 0.0), initial=0)
    same = ops.logical_or(ops.equal(a, b), ops.logical_and(ops.isnan(a), ops.isnan(b)))
    near = ops.abs(a - b) <= tolerance * ops.maximum(size, _SMALL)
    return ops.all(ops.logical_or(same, near))


def value_of(x: Any) -> Any:
    """What a variable holds here; any other value as a tensor."""
    return x.value if isinstance(x, keras.Variable) else ops.convert_to_tensor(x)


def all_true(found: list[Any]) -> Any:
    """Whether all of these hold."""
    return ops.all(ops.stack([ops.convert_to_tensor(x) for x in found]))
