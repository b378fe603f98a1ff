"""How a function is tried on rows of a batch, and what is said of it.

What a trial assigns and draws is forgotten. A function that asks for its replica knows
of the others, and what draws numbers that Keras's seeds do not decide cannot be
compared: neither is judged.

Whether what a user's `train_step` or `test_step` comes to is a mean over rows.

What a replica gives to `optimizer.apply` is added up, weighted by rows; so are the
numbers that it returns beside the results of metrics, and a number that it gives to a
`Mean`. That is what one device gives where these are means over rows. They are not
where the step adds rows up, compares them with each other, or clips gradients before it
applies them. What it gives to other metrics is added up as it is, and what it assigns
to weights must be the same on all replicas, also where it takes that back. So the step
is called on a few rows and on the halves of them, and what it comes to is compared,
which changes nothing.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops, tree

from keras_strategy.core.context import DryRun, distributed_replica, dry_run_scope
from keras_strategy.core.per_replica_attributes import discard_attribute_changes
from keras_strategy.core.registry import get_engine, preserve_random_states
from keras_strategy.core.step_state import RowRange, StepState
from keras_strategy.training import random
from keras_strategy.training.variable_sync import is_sync_on_read

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


def check_rows_if_possible(
    check: Callable[..., Any], structure: Any, *args: Any
) -> Any:
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


# More rows tell no more, and take memory.
_ROWS = 8
# Relative to the largest entry of a gradient, and of all of them.
_ROUNDING, _OF_ALL = 1e-2, 1e-3
_HALF = ("float16", "bfloat16")


def step_is_mean_over_rows(
    model: Any, step: str, data: Any, layers: Sequence[Any]
) -> Any:
    """Whether what a model's step comes to is a mean; True if nobody can tell.

    Args:
        model: The model.
        step: "train_step" or "test_step".
        data: The replica's rows of a batch.
        layers: The model's layers.
    """
    if any(layer.compute_dtype in _HALF for layer in layers):
        return True  # rounding tells nothing
    some = tree.map_structure(lambda x: x[:_ROWS] if has_rows(x) else x, data)
    tried = getattr(model, step), model, layers
    replica = distributed_replica()
    if random.settings.exact and replica is not None and replica.step.rows is not None:
        found = check_rows_if_possible(_adds_up, some, replica.step, *tried)
        if found is not None:
            return found
    return check_rows(_adds_up, some, None, *tried)


def _adds_up(
    trial: DryRun,
    whole: Any,
    first: Any,
    second: Any,
    at: StepState | None,
    step: Callable[[Any], Any],
    model: Any,
    layers: Sequence[Any],
) -> Any:
    """Whether what comes of some rows is the mean of what comes of their halves.

    Random numbers are other ones for fewer rows. A step that draws is given those that
    it gets as a replica, in the step `at`. Without that it is told by as many rows each
    time: where no row depends on another, what AB and BA come to is what AA and BB come
    to.
    """
    count, half = (_rows_of(part) for part in (whole, first))

    def outcome(rows, begin=0):
        if at is not None:
            own = RowRange(begin, _rows_of(rows), count)
            trial.step = StepState(rows=own, draws=at.draws, dry_run=at.dry_run)
        return _outcome(trial, step, model, layers, rows)

    once, again = outcome(whole), outcome(whole)
    repeats = _alike(once, again)
    by_itself = get_engine().static_int(ops.cast(repeats, "int32")) == 0
    if by_itself:  # it draws, and not by Keras
        with preserve_random_states():
            once = outcome(whole)
        with preserve_random_states():
            repeats = _alike(once, outcome(whole))
    if by_itself or (trial.drew_random and at is None):
        found = []
        for parts in ((second, first), (first, first), (second, second)):
            rows = tree.map_structure(
                lambda a, b: ops.concatenate([a, b]) if has_rows(a) else a, *parts
            )
            with preserve_random_states():
                found.append(outcome(rows))
        other, *parts = found
    else:
        trial.row_fraction, other = 0.5, once
        parts = [outcome(first), outcome(second, half)]
    trial.drew_random = False
    same = _alike(_sums(once, other), _sums(*parts))
    return ops.logical_or(same, ops.logical_not(repeats))


def _rows_of(structure: Any) -> Any:
    return next(ops.shape(x)[0] for x in tree.flatten(structure) if has_rows(x))


def _outcome(
    trial: DryRun,
    step: Callable[[Any], Any],
    model: Any,
    layers: Sequence[Any],
    rows: Any,
) -> tuple[list[Any], ...]:
    """What a step comes to; nothing changes.

    The results of metrics are those of no rows then, and weights stay as they are.

    Returns:
        What it gives to optimizers, what it returns, what it adds to metrics, and by
        how much it changes weights, squared: there may be no mean of that.
    """
    trial.gradients, logs = [], None
    variables = model.trainable_variables
    with (
        get_engine().gradient_variable_copies(variables, layers) as copies,
        _Noting(variables, copies) as noted,
    ):
        try:
            logs = step(rows)
        except Exception:
            # It may look for what applying has changed.
            if not trial.gradients:
                raise
    # The parts of a sum, as if they were of all rows: their mean is the sum, too.
    added = [ops.cast(part, "float32") / trial.row_fraction for part in noted.added]
    changes = [ops.square(change) for change in noted.changes]
    outcome = trial.gradients, tree.flatten(logs), added, changes
    return tuple(map(_numbers, outcome))


class _Noting(DiscardUpdates):
    """Notes what is assigned.

    Args:
        weights: The variables that train.
        values: What variables hold here.

    Attributes:
        added: What is added to variables that are added up over the replicas.
        changes: By how much weights are to change.
    """

    def __init__(self, weights: Sequence[Any], values: Sequence[tuple[Any, Any]]):
        super().__init__(state_mapping=values)
        self._weights = {id(variable) for variable in weights}
        self.added: list[Any] = []
        self.changes: list[Any] = []

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Keeps by how much a variable was to change."""
        variable, value = update
        if id(variable) in self._weights:
            self.changes.append(ops.subtract(value, variable.value))
        elif is_sync_on_read(variable) and variable.aggregation == "sum":
            self.added.append(ops.subtract(value, variable.value))


def _numbers(values: Any) -> list[Any]:
    return [
        ops.cast(ops.reshape(ops.convert_to_tensor(x), (-1,)), "float32")
        for x in values
        if x is not None
    ]


def _sums(some: tuple, others: tuple) -> tuple:
    """What two outcomes come to."""
    return tuple(
        [a + b for a, b in zip(*pair, strict=True)]
        for pair in zip(some, others, strict=True)
    )


def _alike(some: tuple, others: tuple) -> Any:
    """Whether outcomes are equal but for rounding; so are those that overflow.

    Where the first one does not, the others must not either.
    """
    found = ops.convert_to_tensor(True)
    for numbers in zip(some, others, strict=True):
        pairs = [pair for pair in zip(*numbers, strict=True) if 0 not in pair[0].shape]
        if pairs:
            sizes = ops.stack([ops.max(ops.abs(a)) for a, _ in pairs])
            apart = ops.stack([ops.max(ops.abs(a - b)) for a, b in pairs])
            allowed = _ROUNDING * ops.maximum(sizes, _OF_ALL * ops.max(sizes))
            # Of what overflows no comparison holds.
            lost = ops.logical_and(
                ops.isfinite(sizes), ops.logical_not(ops.isfinite(apart))
            )
            differ = ops.any(ops.logical_or(apart > allowed, lost))
            found = ops.logical_and(found, ops.logical_not(differ))
    return found
