"""State that a training step assigned, merged over the replicas.

One device assigns a variable once, from all rows of a batch; replicas assign from
theirs. The user's aggregation is applied at the assignment. Without one, this module's
table covers Keras's own variables; all others must be equal on all replicas, or it is
an error.
"""

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

from keras_strategy.core.protocol import Replica
from keras_strategy.rules.aggregation import select_first_replica
from keras_strategy.rules.reduction import cast_for_sum
from keras_strategy.rules.row_weights import apply_row_weight


class StateRule(enum.Enum):
    """Merging of a variable that the replicas of a step assigned."""

    MEAN_OF_ROWS = "the mean of the replicas' values, weighted by rows"
    EQUAL = "the same on all replicas, as it is computed from what is"
    CHECKED = "the same on all replicas, or an error"


@dataclass(frozen=True)
class KerasState:
    """Variables without an aggregation that Keras itself assigns in a step."""

    owner: type
    attributes: tuple[str, ...]
    rule: StateRule


# All that Keras 3.15 assigns while a model trains, but for two kinds that need no line
# here: what optimizers assign in `apply` is computed from gradients that were summed
# before, and the variables of metrics are made with an aggregation, a sum, which
# counts as written. `adapt`, quantization and `load` assign outside of steps. The state
# of a stateful RNN has a row for each row of a batch, of which a replica has its own.
KERAS_STATE = (
    KerasState(
        keras.layers.BatchNormalization,
        (
            "moving_mean",
            "moving_variance",
            "renorm_mean",
            "renorm_stddev",
            "moving_stddev",
        ),
        StateRule.MEAN_OF_ROWS,
    ),
    KerasState(keras.layers.SpectralNormalization, ("vector_u", "kernel"), StateRule.EQUAL),
    KerasState(keras.random.SeedGenerator, ("state",), StateRule.EQUAL),
)

_RULE = "_ks_state_rule"

AGGREGATION_HELP = (
    'aggregation="sum" adds up what the replicas add with `assign_add` (or assign), '
    'aggregation="mean" takes the mean over all rows, and '
    'aggregation="only_first_replica" the first replica\'s value'
)


def declare_state_rules(owner: Any) -> None:
    """Attach the rules of the variables that a Keras object assigns."""
    for entry in KERAS_STATE:
        if isinstance(owner, entry.owner):
            for name in entry.attributes:
                variable = getattr(owner, name, None)
                if isinstance(variable, keras.Variable):
                    vars(variable)[_RULE] = entry.rule


def state_rule_of(variable: Any) -> StateRule | None:
    """Return the rule attached to a variable, or None."""
    return vars(variable).get(_RULE)


def sync_state(
    replica: Replica,
    layers: Callable[[], Iterable[Any]],
    require: Callable[[Any, str], None],
) -> None:
    """Merge the state that a step assigned, at its end, in one flat reduction.

    Args:
        replica: The replica.
        layers: Returns the model's layers.
        require: Raises an error with a message unless a condition holds; in a compiled
            program, when it is executed.
    """
    assigned = list(replica.step.assigned.values())
    if not assigned:
        return
    if any(_RULE not in vars(variable) for variable in assigned):
        for layer in layers():
            declare_state_rules(layer)
        for variable in assigned:
            vars(variable).setdefault(_RULE, StateRule.CHECKED)
    averaged = [v for v in assigned if vars(v)[_RULE] is StateRule.MEAN_OF_ROWS]
    checked = [v for v in assigned if vars(v)[_RULE] is StateRule.CHECKED]
    weight = replica.step.row_weight
    if checked:
        values = [cast_for_sum(v.value) for v in checked]
        parts = [apply_row_weight(ops.convert_to_tensor(v.value), weight) for v in averaged]
        parts += [select_first_replica(replica, value) for value in values]
        sums = replica.weighted_sum(parts, None)
        for variable, value, first in zip(
            checked, values, sums[len(averaged) :], strict=True
        ):
            # What a replica without rows computed is of rows that stand in.
            alike = ops.logical_or(_alike(value, first), weight == 0)
            require(alike, _differ(variable))
    elif averaged:
        parts = [ops.convert_to_tensor(v.value) for v in averaged]
        sums = replica.weighted_sum(parts, weight)
    else:
        return
    for variable, value in zip([*averaged, *checked], sums, strict=True):
        replica.write(variable, value)


def _alike(value: Any, first: Any) -> Any:
    """Return True if two tensors are equal, up to rounding of floats."""
    dtype = keras.backend.standardize_dtype(value.dtype)
    if "float" not in dtype:
        return ops.all(ops.equal(value, first))
    value, first = (ops.cast(x, "float64") for x in (value, first))
    both_nan = ops.logical_and(ops.isnan(value), ops.isnan(first))
    same = ops.logical_or(ops.equal(value, first), both_nan)
    difference = ops.where(same, 0.0, ops.abs(value - first))
    size = ops.where(ops.isfinite(first), ops.abs(first), 0.0)
    return ops.all(difference <= _ROUNDING.get(dtype, 0.0) * ops.max(size, initial=0))


# Relative to the largest entry; some operations' worth, since devices need not round
# alike.
_ROUNDING = {"float64": 2**-48, "float32": 2**-19}


def _differ(variable: Any) -> str:
    return (
        f"The variable '{variable.path}' was assigned in a training step, differs "
        "between the replicas, and has no aggregation that says what becomes of it. "
        f"Make it with one: {AGGREGATION_HELP}. Received a variable with "
        'aggregation="none".'
    )
