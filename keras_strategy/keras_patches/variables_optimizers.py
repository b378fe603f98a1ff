"""Patches of `keras.Variable` and optimizers."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from keras_strategy.core import context
from keras_strategy.core.step_state import APPLY, active_recorder, replica_recorders
from keras_strategy.keras_patches.internals import as_stored, stored_value
from keras_strategy.keras_patches.patch import (
    SubclassPatch,
    before_apply,
    hook,
    in_distributed_scope,
)
from keras_strategy.training import variable_sync
from keras_strategy.training.ownership import (
    check_owner,
    set_owner,
    strategy_of_variable,
)
from keras_strategy.training.random import EndOfDryRun
from keras_strategy.training.sharding import creating_slots

# The original, so that an increment is not aggregated twice.
_assign_as_is = keras.Variable.assign


@hook(keras.Variable, "__init__", ())
def _init(original, self, *args, **kwargs):
    """Record the scope in which a variable is created as its strategy."""
    dry_run = context.thread_state.dry_run
    if dry_run is not None and dry_run.draws is not None:
        raise EndOfDryRun("a variable is created")
    strategy = context.current_scope()
    if strategy is not None:
        strategy.extended.group.note_created(self)
    original(self, *args, **kwargs)
    if strategy is not None:
        set_owner(self, strategy)


@hook(keras.Variable, "assign", "(self, value)", when=before_apply)
def _assign(original, replica, self, value):
    """Aggregate the values that the replicas assign."""
    if replica.step.row_weight is None and self.synchronization != "on_read":
        strategy = context.get_strategy()  # of `run`
        if self.trainable:  # strategies may share a seed generator
            check_owner(strategy, self)
        if self.aggregation == "none":
            strategy.extended.assigned_in_run[id(self)] = self
    value = as_stored(self, value)
    is_unaggregated = self.aggregation == "none"
    if is_unaggregated and variable_sync.is_shared_without_aggregation(replica, self):
        value = variable_sync.aggregate_shared_assignment(replica, self, value)
    else:
        value = variable_sync.aggregate_assignment(replica, self, value)
    return original(self, value)


@hook(keras.Variable, ("assign_add", "assign_sub"), "(self, value)", when=before_apply)
def _assign_add(original, replica, self, value):
    """Aggregate the increments of the replicas."""
    # Keras assigns `self + value`; the sum of that over replicas would count the
    # variable once per replica.
    is_on_read = variable_sync.is_sync_on_read(self)
    if is_on_read or self.aggregation not in ("sum", "mean"):
        return original(self, value)
    increment = variable_sync.aggregate(replica, self, as_stored(self, value))
    sign = -1 if original.__name__ == "assign_sub" else 1
    return _assign_as_is(self, ops.add(self.value, ops.multiply(increment, sign)))


def variables_of(model: keras.Model, metrics: bool = True) -> dict[str, Any]:
    """Return a model's, its optimizers' and metrics' variables, by portable names."""
    groups: dict[str, Any] = {"model": model.variables}
    for name, value in vars(model).items():
        # Not `isinstance`, which raises for a dead weak reference.
        is_list = issubclass(type(value), list | tuple)
        for number, leaf in enumerate(value if is_list else [value]):
            if issubclass(type(leaf), keras.optimizers.Optimizer):
                groups[f"{name}/{number}"] = leaf.variables
    if metrics:
        groups["metrics"] = model.metrics_variables
    return {
        f"{group}/{number}": variable
        for group, variables in groups.items()
        for number, variable in enumerate(variables)
    }


def _sum_and_apply(
    replica: Any,
    optimizer: Any,
    grads: Sequence[Any],
    variables: Sequence[Any] | None,
    apply: Callable[[Sequence[Any]], Any],
) -> Any:
    """Call `apply` with the sums of the gradients, unless they are summed already."""
    if replica is None:
        return _apply_alone(optimizer, grads, variables, apply)
    if replica.step.is_applying:
        return apply(grads)
    strategy: Any = context.current_scope()
    recorder = replica_recorders.get(id(strategy))
    if recorder is not None:
        sums = _sum_gradients(strategy, replica, optimizer, grads, variables)
        if replica.index == 0:
            recorder.add(optimizer, sums, variables)
        return None
    if variables and replica.step.row_weight is None:  # usually all are of one model
        check_owner(strategy, variables[0])
    if not optimizer.built and variables is not None:

        def build():
            if not optimizer.built:
                optimizer.build(variables)
                optimizer.built = True

        replica.once(build)
    sums = _sum_gradients(strategy, replica, optimizer, grads, variables)
    # Like its gradients, what an optimizer draws is equal on all replicas.
    replica.step.is_applying = replica.step.is_drawing = True
    try:
        if replica.share_update is not None:
            return replica.share_update(apply, sums)
        return apply(sums)
    finally:
        replica.step.is_applying = replica.step.is_drawing = False


def _apply_alone(optimizer, grads, variables, apply):
    """Call `apply` outside of replicas, where only a strategy of one allows it."""
    strategy = in_distributed_scope()
    if strategy is not None:
        strategy.extended.group.check_cross_replica_apply()
    elif context.thread_state.dry_run is not None:
        raise EndOfDryRun("gradients are applied")
    elif (recorder := active_recorder()) is not None:
        recorder.add(optimizer, list(grads), variables)
        return None
    owner = strategy_of_variable(variables[0]) if variables else None
    is_alone = context.current_replica() is None  # perhaps in a step that runs whole
    if owner is not None and is_alone and not optimizer.built:
        with owner.scope():
            optimizer.build(variables)
    return apply(grads)


def _sum_gradients(
    strategy: Any, replica: Any, optimizer: Any, grads: Sequence[Any], variables: Any
) -> list[Any]:
    """Sum those that are not None over the replicas, weighted by rows."""
    step, reducer = replica.step, strategy.extended.custom_reducer
    present = [grad for grad in grads if grad is not None]
    step.optimizer, step.reducing_gradients_of = optimizer, variables
    if len(present) < len(grads):
        absent = [index for index, grad in enumerate(grads) if grad is None]
        step.reduction = f"{APPLY} without gradients of variables {absent}"
        if variables is not None:
            pairs = zip(grads, variables, strict=False)  # Keras checks the count
            step.reducing_gradients_of = [v for grad, v in pairs if grad is not None]
    try:
        if reducer is None:
            sums = replica.weighted_sum(present, step.row_weight)
        else:
            sums = reducer.weighted_sum(replica, present, step.row_weight)
    finally:
        step.optimizer = step.reducing_gradients_of = None
        step.reduction = APPLY
    if len(present) == len(grads):
        return list(sums)
    rest = iter(sums)
    return [None if grad is None else next(rest) for grad in grads]


def _apply_sums(original: Callable) -> Callable:
    def apply(self, grads, *args, **kwargs):
        replica = context.distributed_replica()
        if replica is not None and replica.step.is_applying:
            return original(self, grads, *args, **kwargs)
        grads = list(grads)
        variables = args[0] if args else kwargs.get("trainable_variables")
        if variables is not None:
            variables = list(variables)
            if args:
                args = (variables, *args[1:])
            else:
                kwargs["trainable_variables"] = variables

        def apply(grads):
            return original(self, grads, *args, **kwargs)

        return _sum_and_apply(replica, self, grads, variables, apply)

    return apply


def _apply_pairs_of_sums(original: Callable) -> Callable:
    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        replica = context.distributed_replica()
        pairs = list(grads_and_vars)
        grads, variables = map(list, zip(*pairs, strict=True)) if pairs else ([], [])

        def apply(grads):
            pairs = list(zip(grads, variables, strict=True))
            return original(self, pairs, *args, **kwargs)

        return _sum_and_apply(replica, self, grads, variables, apply)

    return apply_gradients


def _apply_values_of_sums(original: Callable) -> Callable:
    def stateless_apply(self, optimizer_variables, grads, trainable_variables):
        def apply(grads):
            return original(self, optimizer_variables, grads, trainable_variables)

        replica = context.distributed_replica()
        if replica is None or replica_recorders:  # left to `apply`
            return apply(grads)
        # LossScaleOptimizer calls `apply` in a condition, where JAX cannot communicate.
        return _sum_and_apply(replica, self, list(grads), None, apply)

    return stateless_apply


class _Apply(SubclassPatch):
    """Sum the gradients over the replicas once, before an optimizer uses them."""

    # Keras's code and the user's then clip, accumulate, scale and apply equal inputs on
    # every replica. The outermost call sums: an `apply` of the user's calls Keras's,
    # and LossScaleOptimizer calls another optimizer.

    owner = keras.optimizers.Optimizer
    wrappers = {
        "apply": _apply_sums,
        "apply_gradients": _apply_pairs_of_sums,
        "stateless_apply": _apply_values_of_sums,
    }


_apply = _Apply()


def adopt_variables(strategy: Any, model: keras.Model) -> None:
    """Mirror what a model uses but what was created outside the scope."""
    adopt(strategy, [*model.variables, *model.metrics_variables])
    with creating_slots():
        # Including the user's own attributes.
        for value in vars(model).values():
            # Not `isinstance`, which raises for a dead weak reference.
            kind = type(value)
            values = value.values() if issubclass(kind, dict) else value
            for leaf in values if issubclass(kind, dict | list | tuple) else (value,):
                if issubclass(type(leaf), keras.optimizers.Optimizer):
                    adopt(strategy, leaf.variables)


def adopt(strategy: Any, variables: Any) -> None:
    """Make initialized variables without a strategy belong to `strategy`."""
    unowned = []
    for variable in variables:
        owner = strategy_of_variable(variable)
        if owner is None and stored_value(variable) is not None:
            unowned.append(variable)
        elif owner not in (None, strategy):
            raise RuntimeError(
                f"Mixing different strategies: the variable '{variable.path}' was "
                f"created in the scope of {owner!r} and is used under {strategy!r}. "
                "Create the whole model in one scope."
            )
    if unowned:
        strategy.extended.group.adopt(unowned)
    for variable in unowned:
        set_owner(variable, strategy)
