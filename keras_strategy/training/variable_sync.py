"""Aggregation and synchronization of `keras.Variable`.

A variable made in a scope is *mirrored*: every replica has a component, and what
replicas assign is aggregated at once. With `synchronization="on_read"` every replica
keeps its own value, and a read outside the replicas aggregates.

One device assigns a variable once in a training step, from all rows of a batch;
replicas assign from theirs. The user's aggregation is applied at the assignment.
Without one, `KERAS_STATE` covers Keras's own variables; all others must be equal on all
replicas at the end of the step, or it is an error. A variable that one device keeps for
all replicas (parameter device) must be covered at the assignment, as in tf.distribute.
"""

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
from keras import ops

from keras_strategy.core import context
from keras_strategy.core.protocols import Replica
from keras_strategy.core.step_state import active_recorder
from keras_strategy.devices import ReplicaTopology
from keras_strategy.options import GLOBAL
from keras_strategy.training.reduction import cast_for_sum, is_float
from keras_strategy.training.row_weights import apply_row_weight, where_has_rows
from keras_strategy.values import ReduceOp


def is_sync_on_read(variable: Any) -> bool:
    """Return True if every replica keeps its own value until a read."""
    return variable.synchronization == "on_read"


def aggregate(
    replica: Replica, variable: Any, value: Any, aggregation: str | None = None
) -> Any:
    """Aggregate what the replicas assign or add to a mirrored variable."""
    weight = replica.step.row_weight
    aggregation = aggregation or variable.aggregation
    if aggregation == "sum":
        value = where_has_rows(weight, value, ops.zeros_like(value))
        total = replica.all_reduce(ReduceOp.SUM, value)
    elif aggregation == "only_first_replica":
        total = replica.all_reduce(ReduceOp.SUM, select_first_replica(replica, value))
    elif weight is None:
        total = replica.all_reduce(ReduceOp.MEAN, value)
    else:
        floats = value if is_float(value) else ops.cast(value, "float64")
        total = replica.weighted_sum([floats], weight)[0]
    if is_float(total) and not is_float(value):
        total = ops.round(total)
    return ops.cast(total, value.dtype)


def select_first_replica(replica: Replica, value: Any) -> Any:
    """Return the summand whose sum over replicas is the first one's value."""
    first = ops.equal(replica.id, 0)
    return ops.where(first, value, ops.zeros_like(value))


def aggregate_assignment(replica: Replica, variable: Any, value: Any) -> Any:
    """Return what a replica that assigns `value` must write."""
    step = replica.step
    if is_sync_on_read(variable):
        step.on_read_writes[id(variable)] = variable
        step.on_read_merged.pop(id(variable), None)
        return where_has_rows(step.row_weight, value, variable.value)
    if variable.aggregation == "none":
        step.assigned[id(variable)] = variable
        return value
    if (
        variable.aggregation == "sum"
        and step.row_weight is not None
        and id(variable) in step.sum_variables_read
    ):
        raise ValueError(
            f"The variable '{variable.path}' has aggregation=\"sum\" and was assigned "
            "in a training step that had read it. The replicas' values are summed, so "
            "the old value may be counted once per replica. Add this replica's summand "
            "with `assign_add` instead, which counts it once."
        )
    return aggregate(replica, variable, value)


def split_assigned_value(variable: Any, value: Any, replicas: int) -> tuple[Any, Any]:
    """Return the first replica's and every other replica's part of a value."""
    if not is_sync_on_read(variable) or variable.aggregation != "sum":
        return value, value
    # Divided, an on-read sum reads as it was assigned.
    if "int" not in keras.backend.standardize_dtype(value.dtype):
        share = value / replicas
        return share, share
    share = value // replicas
    return value - share * (replicas - 1), share


def split_for_local_replicas(
    variable: Any, value: Any, topology: ReplicaTopology
) -> list[Any]:
    """Return `split_assigned_value` for each replica of this worker."""
    first, other = split_assigned_value(variable, value, topology.num_replicas)
    return [first if replica == 0 else other for replica in topology.local_replicas]


def local_summands(
    variable: Any, values: Sequence[Any], topology: ReplicaTopology
) -> list[Any]:
    """Return the local replicas' summands of an on-read variable's value."""
    if variable.aggregation == "mean":
        return [ops.divide(value, topology.num_replicas) for value in values]
    if variable.aggregation == "only_first_replica":
        return [
            value if replica == 0 else ops.zeros_like(value)
            for replica, value in zip(topology.local_replicas, values, strict=True)
        ]
    return list(values)


def no_value_error(variable: Any) -> ValueError:
    return ValueError(
        f"The variable '{variable.path}' has synchronization='on_read' and "
        "aggregation='none', so it has no value outside of the replicas, and a metric "
        'with it has no result. Create it with aggregation="sum", "mean" or '
        '"only_first_replica", read it in `strategy.run`, or use '
        "`experimental_local_results`."
    )


class StateRule(enum.Enum):
    """Merging of a variable that the replicas of a step assigned."""

    MEAN_OF_ROWS = "mean of the replicas' values, weighted by rows"
    EQUAL = "equal on all replicas, as it is computed from equal values"
    CHECKED = "equal on all replicas, or an error"


# All variables that Keras 3.15 assigns in training, with these exceptions: optimizers
# assign from gradients that are already reduced, and metric variables have an
# aggregation. `adapt`, quantization and `load` assign outside of steps. The state of a
# stateful RNN has one row per row of the batch, so each replica keeps its own.
KERAS_STATE = (
    (
        keras.layers.BatchNormalization,
        StateRule.MEAN_OF_ROWS,
        "moving_mean moving_variance renorm_mean renorm_stddev moving_stddev",
    ),
    (keras.layers.SpectralNormalization, StateRule.EQUAL, "vector_u kernel"),
    (keras.random.SeedGenerator, StateRule.EQUAL, "state"),
)

_RULE = "_ks_state_rule"

AGGREGATION_HELP = (
    'aggregation="sum" sums what the replicas assign or add with `assign_add`, '
    'aggregation="mean" takes the mean over all rows, and '
    'aggregation="only_first_replica" takes the first replica\'s value'
)


def declare_state_rules(owner: Any) -> None:
    """Attach the rules of the variables that a Keras object assigns."""
    for kind, rule, attributes in KERAS_STATE:
        if isinstance(owner, kind):
            for name in attributes.split():
                variable = getattr(owner, name, None)
                # torch.compile cannot trace the assignment: it is made once.
                is_variable = isinstance(variable, keras.Variable)
                if is_variable and vars(variable).get(_RULE) is not rule:
                    vars(variable)[_RULE] = rule


def sync_state(
    replica: Replica,
    layers: Callable[[], Iterable[Any]],
    require: Callable[[Any, str], None],
) -> None:
    """Merge the state that a step assigned, at its end, in one flat reduction."""
    # `require` raises an error with a message unless a condition holds when it
    # executes.
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
    if not averaged and not checked:
        return
    weight = replica.step.row_weight
    parts = [ops.convert_to_tensor(v.value) for v in averaged]
    values = [cast_for_sum(v.value) for v in checked]
    if checked:
        parts = [apply_row_weight(part, weight) for part in parts]
        parts += [select_first_replica(replica, value) for value in values]
    sums = replica.weighted_sum(parts, None if checked else weight)
    firsts = sums[len(averaged) :]
    recorder = active_recorder(context.current_scope())
    for variable, value, first in zip(checked, values, firsts, strict=True):
        # A replica without rows computes on placeholder rows.
        is_valid = ops.logical_or(_is_equal(value, first), weight == 0)
        message = (
            f"The variable '{variable.path}' was assigned in a training step, differs "
            "between the replicas, and has no aggregation to merge its values. Create "
            f"it with one: {AGGREGATION_HELP}. Received a variable with "
            'aggregation="none".'
        )
        if recorder is None:
            require(is_valid, message)
        elif not is_valid:  # on some workers, so it must not end the step
            recorder.failures.append(message)
    for variable, value in zip([*averaged, *checked], sums, strict=True):
        replica.write(variable, value)


def declare_if_shared(owner: Any) -> None:
    """Declare the rules of a Keras object's variables if replicas share memory."""
    strategy = context.current_scope()
    if strategy is not None and (
        strategy.parameter_device is not None or strategy.virtual_replicas is not None
    ):
        declare_state_rules(owner)


def average_statistics(replica: Replica) -> None:
    """Average the moving statistics that layers have assigned in `run`."""
    averaged = [
        variable
        for variable in replica.step.assigned.values()
        if vars(variable).get(_RULE) is StateRule.MEAN_OF_ROWS
    ]
    strategy = context.get_strategy()
    # Global statistics are equal already.
    if averaged and strategy.batch_statistics != GLOBAL:
        replicas = strategy.extended.topology.num_replicas
        parts = [ops.divide(variable.value, replicas) for variable in averaged]
        sums = replica.weighted_sum(parts, None)
        for variable, total in zip(averaged, sums, strict=True):
            replica.write(variable, total)


# Relative to the largest entry: a few operations' worth, since devices may round
# differently.
_ROUNDING = {"float64": 2**-48, "float32": 2**-19}


def _is_equal(value: Any, first: Any) -> Any:
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


def is_shared_without_aggregation(replica: Replica, variable: Any) -> bool:
    """Return True if replicas that share memory must aggregate an assignment."""
    owner = vars(variable).get("_ks_strategy")
    if owner is None or is_sync_on_read(variable):
        return False
    if owner.virtual_replicas is not None:  # a training step merges at its end
        return replica.step.row_weight is None
    return owner.parameter_device is not None


def aggregate_shared_assignment(replica: Replica, variable: Any, value: Any) -> Any:
    """Return what all replicas must write to a variable in shared memory."""
    rule = vars(variable).get(_RULE)
    if rule is StateRule.EQUAL:
        return value
    if rule is StateRule.MEAN_OF_ROWS:
        return aggregate(replica, variable, value, "mean")
    raise ValueError(
        f"The variable '{variable.path}' is stored once for several replicas, but each "
        "replica assigns its own value. Create it with an aggregation to merge them: "
        f"{AGGREGATION_HELP}. Received a variable with "
        'aggregation="none".'
    )


def merged_values(replica: Replica, variables: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return pairs of on-read variables and their values over all replicas."""
    # One reduction covers them and all others that the step has assigned so far, since
    # the results of other metrics are likely to be read next.
    step = replica.step
    requested = {id(v): v for v in variables if is_sync_on_read(v)}
    merged = step.on_read_merged
    if not requested.keys() <= merged.keys():
        missing = {
            key: variable
            for key, variable in {**step.on_read_writes, **requested}.items()
            if key not in merged
            and (key in requested or variable.aggregation != "none")
        }
        summands = []
        for variable in missing.values():
            if variable.aggregation == "none":
                raise no_value_error(variable)
            value = cast_for_sum(variable.value)
            if variable.aggregation == "only_first_replica":
                value = select_first_replica(replica, value)
            elif variable.aggregation == "mean":
                value = value / context.get_strategy().extended.topology.num_replicas
            summands.append(value)
        sums = replica.weighted_sum(summands, None)
        merged.update(zip(missing, sums, strict=True))
        step.on_read_writes.clear()
    return [(v, ops.cast(merged[key], v.dtype)) for key, v in requested.items()]
