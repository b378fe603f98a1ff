"""Whether what a user's `train_step` or `test_step` comes to is a mean over rows.

What a replica gives to `optimizer.apply` is added up, weighted by rows; so are the
numbers that it returns beside the results of metrics, and a number that it gives to a
`Mean`. That is what one device gives where these are means over rows. They are not
where the step adds rows up, compares them with each other, or clips gradients before it
applies them. What it gives to other metrics is added up as it is, and what it assigns
to weights must be the same on all replicas, also where it takes that back. So the step
is called on a few rows and on the halves of them, and what it comes to is compared,
which changes nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any

from keras import ops, tree

from keras_strategy.core.context import DryRun, distributed_replica
from keras_strategy.core.random_states import preserve_random_states
from keras_strategy.core.registry import get_engine
from keras_strategy.core.row_range import RowRange
from keras_strategy.core.step_state import StepState
from keras_strategy.rules import draws
from keras_strategy.rules.aggregation import is_sync_on_read
from keras_strategy.rules.trials import (
    DiscardUpdates,
    has_rows,
    check_rows,
    check_rows_if_possible,
)

# More rows tell no more, and take memory.
_ROWS = 8
# Relative to the largest entry of a gradient, and of all of them.
_ROUNDING, _OF_ALL = 1e-2, 1e-3
_HALF = ("float16", "bfloat16")


def step_is_mean_over_rows(model: Any, step: str, data: Any, layers: Sequence[Any]) -> Any:
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
    if draws.settings.exact and replica is not None and replica.step.rows is not None:
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
