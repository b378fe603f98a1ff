"""Checks of functions on rows of a batch, without keeping their effects.

A function that uses its replica context is exempt, and so is one that draws random
numbers without Keras's seeds.

A user's `train_step` or `test_step` must be a mean over rows: its gradients, the
numbers that it returns besides metrics, and numbers for a `Mean` are summed over
replicas, weighted by rows. They are not means if the step sums or compares rows, or
clips gradients before applying them. Values for other metrics are summed unweighted,
and values assigned to weights must be equal on all replicas. So the step is run on a
few rows and on their halves, and the results are compared.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops, tree

from keras_strategy.core.context import DryRun, distributed_replica, dry_run_scope
from keras_strategy.core.registry import get_engine, preserve_random_states
from keras_strategy.core.step_state import RowRange, StepState, has_rows, map_rows
from keras_strategy.training import random
from keras_strategy.training.variable_sync import is_sync_on_read

logger = logging.getLogger("keras_strategy")

# Entries smaller than this are compared absolutely.
_SMALL = 1e-2

# Names of checks and warnings that are done, for each object.
_finished_checks: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
GATHER = "`ks.get_replica_context().all_gather(x, axis=0)`"


def warn_once(target: Any, message: str) -> Callable[[], None]:
    """Return a function that logs a warning about an object, once."""
    reference = weakref.ref(target)

    def warn():
        if (referent := reference()) is not None and is_new(referent, message):
            logger.warning(message)

    return warn


def is_new(target: Any, name: str) -> bool:
    """Return True at the first call for this object and name."""
    names = _finished_checks.setdefault(target, set())
    if name in names:
        return False
    names.add(name)
    return True


def check_rows(check: Callable[..., Any], structure: Any, *args: Any) -> Any:
    """Return `check_rows_if_possible`, or True for None."""
    found = check_rows_if_possible(check, structure, *args)
    return True if found is None else found


def check_rows_if_possible(
    check: Callable[..., Any], structure: Any, *args: Any
) -> Any:
    """Run a check on rows and their halves; None if it is undecided.

    Args:
        check: Called with the dry run, some rows, their first and second half, and
            `args`. Returns a boolean or a scalar tensor.
        structure: Tensors with the replica's rows.
        args: See `check`.
    """
    parts, is_enough = split_in_halves(structure)
    if not parts:
        return None
    try:
        with dry_run_scope() as dry_run:
            dry_run.tests_row_independence = True
            found = check(dry_run, *parts, *args)
    except Exception:
        # Some functions need a certain batch size, or create a variable.
        logger.debug("A function could not be audited.", exc_info=True)
        return None
    if dry_run.depends_on_replicas or dry_run.drew_random:
        return None
    return ops.logical_or(found, ops.logical_not(is_enough))


def split_in_halves(structure: Any) -> tuple[list[Any], Any]:
    """Return some rows with their first and second half, and if there are enough.

    The list is empty if there are too few rows; the second value may be a scalar
    tensor.
    """
    leaves = [x for x in tree.flatten(structure) if has_rows(x)]
    if len({x.shape[0] for x in leaves}) != 1:
        return [], False
    rows = ops.shape(leaves[0])[0]
    if isinstance(rows, int):
        half, second, is_enough = rows // 2, rows // 2, rows >= 2
        if not is_enough:
            return [], False
    else:
        half, is_enough = ops.maximum(rows // 2, 1), rows >= 2
        second = ops.minimum(half, rows - 1)

    def part(begin, end):
        return map_rows(lambda x: x[begin:end], structure)

    return [
        part(0, second + half),
        part(0, half),
        part(second, second + half),
    ], is_enough


def call_without_effects(fn: Callable[[Any], Any], rows: Any) -> Any:
    """Call a function; the next call starts with the same seeds."""
    with keras.StatelessScope():
        return fn(rows)


class DiscardUpdates(keras.StatelessScope):
    """Scope that discards assignments at once, so metrics have no rows."""

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Discard the update."""


def is_close(a: Any, b: Any, tolerance: float) -> Any:
    """Return True if two tensors are equal, relative to the largest entry."""
    a, b = (ops.cast(ops.convert_to_tensor(x), "float32") for x in (a, b))
    size = ops.max(ops.where(ops.isfinite(a), ops.abs(a), 0.0), initial=0)
    same = ops.logical_or(ops.equal(a, b), ops.logical_and(ops.isnan(a), ops.isnan(b)))
    near = ops.abs(a - b) <= tolerance * ops.maximum(size, _SMALL)
    return ops.all(ops.logical_or(same, near))


def value_of(x: Any) -> Any:
    """Return a variable's current value, or any other value as a tensor."""
    return x.value if isinstance(x, keras.Variable) else ops.convert_to_tensor(x)


def all_true(found: list[Any]) -> Any:
    """Return True if all conditions hold."""
    return ops.all(ops.stack([ops.convert_to_tensor(x) for x in found]))


# More rows do not improve the check, but take memory.
_ROWS = 8
# Tolerance relative to a gradient's largest entry, and the share of the largest of all.
_ROUNDING, _MIN_SCALE = 1e-2, 1e-3
_HALF = ("float16", "bfloat16")


def step_is_mean_over_rows(
    model: Any, step: str, data: Any, layers: Sequence[Any]
) -> Any:
    """Return True if a model's step is a mean over rows, or undecided."""
    if any(layer.compute_dtype in _HALF for layer in layers):
        return True  # rounding errors are too large
    some = map_rows(lambda x: x[:_ROWS], data)
    arguments = getattr(model, step), model, layers
    replica = distributed_replica()
    if random.settings.exact and replica is not None and replica.step.rows is not None:
        found = check_rows_if_possible(
            _is_mean_over_rows, some, replica.step, *arguments
        )
        if found is not None:
            return found
    return check_rows(_is_mean_over_rows, some, None, *arguments)


def _is_mean_over_rows(
    dry_run: DryRun,
    batch: Any,
    first: Any,
    second: Any,
    step_state: StepState | None,
    step: Callable[[Any], Any],
    model: Any,
    layers: Sequence[Any],
) -> Any:
    """Return True if the outcome for rows is the mean of the halves' outcomes.

    Random numbers differ for fewer rows. With `step_state`, a step draws as a replica
    would. Without it, equal numbers of rows are compared: if no row depends on another,
    the outcomes of AB and BA sum to those of AA and BB.
    """
    count, half = (_rows_of(part) for part in (batch, first))

    def outcome(rows, begin=0):
        if step_state is not None:
            dry_run.step = StepState(
                rows=RowRange(begin, _rows_of(rows), count),
                draws=step_state.draws,
                dry_run=step_state.dry_run,
            )
        return _outcome(dry_run, step, model, layers, rows)

    once, again = outcome(batch), outcome(batch)
    repeats = _outcomes_equal(once, again)
    draws_without_keras = get_engine().static_int(ops.cast(repeats, "int32")) == 0
    if draws_without_keras:  # it draws without Keras
        with preserve_random_states():
            once = outcome(batch)
        with preserve_random_states():
            repeats = _outcomes_equal(once, outcome(batch))
    if draws_without_keras or (dry_run.drew_random and step_state is None):
        found = []
        for parts in ((second, first), (first, first), (second, second)):
            rows = tree.map_structure(
                lambda a, b: ops.concatenate([a, b]) if has_rows(a) else a, *parts
            )
            with preserve_random_states():
                found.append(outcome(rows))
        other, *parts = found
    else:
        dry_run.row_fraction, other = 0.5, once
        parts = [outcome(first), outcome(second, half)]
    dry_run.drew_random = False
    same = _outcomes_equal(_add_outcomes(once, other), _add_outcomes(*parts))
    return ops.logical_or(same, ops.logical_not(repeats))


def _rows_of(structure: Any) -> Any:
    return next(ops.shape(x)[0] for x in tree.flatten(structure) if has_rows(x))


def _outcome(
    dry_run: DryRun,
    step: Callable[[Any], Any],
    model: Any,
    layers: Sequence[Any],
    rows: Any,
) -> tuple[list[Any], ...]:
    """Return what a step would do, without effects.

    Returns:
        Gradients, returned numbers, additions to metrics, and squared changes of
        weights (squared, as these need not be means).
    """
    dry_run.gradients, logs = [], None
    variables = model.trainable_variables
    with (
        get_engine().gradient_variable_copies(variables, layers) as copies,
        _UpdateRecorder(variables, copies) as recorder,
    ):
        try:
            logs = step(rows)
        except Exception:
            # It may depend on changes by the optimizer.
            if not dry_run.gradients:
                raise
    # Scale summands to all rows, so that their mean is the sum.
    added = [
        ops.cast(part, "float32") / dry_run.row_fraction for part in recorder.added
    ]
    changes = [ops.square(change) for change in recorder.changes]
    outcome = dry_run.gradients, tree.flatten(logs), added, changes
    return tuple(map(_numbers, outcome))


class _UpdateRecorder(DiscardUpdates):
    """Scope that records assignments instead of applying them.

    Attributes:
        added: Additions to variables that are summed over the replicas.
        changes: Changes of weights.
    """

    def __init__(self, weights: Sequence[Any], values: Sequence[tuple[Any, Any]]):
        super().__init__(state_mapping=values)
        self._weights = {id(variable) for variable in weights}
        self.added: list[Any] = []
        self.changes: list[Any] = []

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Record the change of a variable."""
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


def _add_outcomes(some: tuple, others: tuple) -> tuple:
    """Return the sums of two outcomes."""
    return tuple(
        [a + b for a, b in zip(*pair, strict=True)]
        for pair in zip(some, others, strict=True)
    )


def _outcomes_equal(some: tuple, others: tuple) -> Any:
    """Return True if outcomes are equal up to rounding, or both overflow."""
    found = ops.convert_to_tensor(True)
    for numbers in zip(some, others, strict=True):
        pairs = [pair for pair in zip(*numbers, strict=True) if 0 not in pair[0].shape]
        if pairs:
            sizes = ops.stack([ops.max(ops.abs(a)) for a, _ in pairs])
            differences = ops.stack([ops.max(ops.abs(a - b)) for a, b in pairs])
            allowed = _ROUNDING * ops.maximum(sizes, _MIN_SCALE * ops.max(sizes))
            # Comparisons with overflowed values are False.
            overflowed = ops.logical_and(
                ops.isfinite(sizes), ops.logical_not(ops.isfinite(differences))
            )
            differ = ops.any(ops.logical_or(differences > allowed, overflowed))
            found = ops.logical_and(found, ops.logical_not(differ))
    return found
