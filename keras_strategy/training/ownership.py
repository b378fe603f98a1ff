"""The strategy that a model, a variable or a distributed value belongs to.

Objects created in a scope belong to its strategy. Objects from outside, such as an
optimizer created before, are adopted when they are used.

Implicit scopes: `fit` and similar methods enter the model's scope. A callback may use
another model: predict with a teacher, fit a plain model. On one device that works, so
the implicit scope must not prevent it. A scope entered by the user is never suspended.

Initial values: workers may draw or compute different ones, so the chief's are sent to
all. One broadcast covers all variables of a scope: at its end, or before the first read
or `run`.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import keras
from keras import ops

from keras_strategy.core import context
from keras_strategy.core.protocols import Strategy
from keras_strategy.core.registry import get_engine
from keras_strategy.devices import ReplicaTopology
from keras_strategy.training.sharding import is_sharded
from keras_strategy.training.variable_sync import is_sync_on_read
from keras_strategy.values import DistributedValues, PerReplica, wrong_strategy_error


def strategy_of_variable(variable: Any) -> Any:
    """Return the strategy whose scope made or adopted a variable, or None."""
    return vars(variable).get("_ks_strategy")


def strategy_of_model(model: keras.Model) -> Any:
    """Return the strategy that a model trains under, or None."""
    strategy = vars(model).get("_ks_strategy")
    if strategy is not None:
        return strategy
    # A model made outside of a scope, such as a wrapper, follows its variables.
    owners = map(strategy_of_variable, model.variables)
    return next((owner for owner in owners if owner is not None), None)


def set_owner(variable: Any, strategy: Strategy) -> None:
    vars(variable)["_ks_strategy"] = strategy
    strategy.extended.variables[id(variable)] = variable


def check_component_count(
    topology: ReplicaTopology, method: str, value: DistributedValues
) -> None:
    """Raise `ValueError` unless a value has one component per local replica."""
    # A value does not record its strategy: strategies of as many replicas accept each
    # other's, as in tf.distribute.
    replicas = len(topology.local_replicas)
    if value.count is not None and value.count != replicas:
        raise wrong_strategy_error(value, method, replicas)


def per_replica_values(
    strategy: Strategy, method: str, variable: Any
) -> DistributedValues | None:
    """Return a variable's value on each replica; None if it has no strategy."""
    owner = strategy_of_variable(variable)
    if owner is None:
        return None
    parts = owner.extended.group.per_replica_value(variable)
    if owner is not strategy:
        check_component_count(strategy.extended.topology, method, parts)
    return parts


def distribute_native(value: Any, is_mirrored: bool = True) -> Any:
    """Return a native tf.distribute value as a `PerReplica`, all else unchanged."""
    components = get_engine().native_components(value, is_mirrored)
    return value if components is None else PerReplica(components)


def cross_replica_value(strategy: Strategy, method: str, variable: Any) -> Any:
    """Return per-replica values of an on-read variable, else a copied tensor."""
    if is_sync_on_read(variable):
        owner = strategy_of_variable(variable)
        if owner is not None and owner.extended.topology.num_replicas > 1:
            return per_replica_values(strategy, method, variable)
    # A copy, as some backends assign variables in place.
    return ops.stop_gradient(ops.copy(variable.value))


def check_owner(strategy: Strategy, variable: Any) -> None:
    """Raise for a variable of a strategy on other devices, which have its values."""
    owner = vars(variable).get("_ks_strategy")
    if owner is None or owner is strategy:
        return
    topology, other = strategy.extended.topology, owner.extended.topology
    if (topology.devices, topology.num_replicas) != (other.devices, other.num_replicas):
        raise ValueError(
            f"The variable '{variable.path}' was created in the scope of {owner!r}, "
            f"but a function that {strategy!r} runs uses it. Create it in the scope of "
            "the strategy that runs the function, or pass `run` the result of its own "
            "strategy's `reduce`."
        )


# Strategies and scopes, with their depths, that `fit` entered implicitly.
_implicit: ContextVar[tuple[tuple[Any, Any, int], ...]] = ContextVar(
    "implicit", default=()
)


@contextlib.contextmanager
def enter_implicit_scope(strategy: Strategy) -> Iterator[None]:
    scope = strategy.scope()
    with scope:
        entry = strategy, scope, len(context.thread_state.scopes)
        token = _implicit.set((*_implicit.get(), entry))
        try:
            yield
        finally:
            _implicit.reset(token)


@contextlib.contextmanager
def suspend_implicit_scope(strategy: Strategy | None) -> Iterator[None]:
    """Suspend an implicit scope of another strategy, if one is innermost."""
    entered = _implicit.get()
    if not entered:
        yield
        return
    current, scope, depth = entered[-1]
    state = context.thread_state
    is_innermost = depth == len(state.scopes) and state.replica is None
    if current is strategy or not is_innermost:
        yield
        return
    token = _implicit.set(entered[:-1])
    scope.__exit__(None, None, None)
    try:
        # The enclosing `fit` may belong to another strategy, too.
        with suspend_implicit_scope(strategy):
            yield
    finally:
        scope.__enter__()
        _implicit.reset(token)


# Strategies and variables that wait for the chief's values.
pending_values: list[tuple[Any, Any]] = []


@contextlib.contextmanager
def without_broadcast() -> Iterator[None]:
    """Context manager that suspends the broadcast while tensors are only passed on."""
    suspended = pending_values[:]
    pending_values.clear()
    try:
        yield
    finally:
        pending_values[:0] = suspended


def broadcast_pending_values() -> None:
    """Broadcast the chief's values of pending variables; a collective call."""
    # By id, as Keras may initialize a variable twice. Cleared first, as reads of the
    # variables call this function.
    pending = {
        id(variable): (strategy, variable) for strategy, variable in pending_values
    }
    pending_values.clear()
    for strategy in {id(owner): owner for owner, _ in pending.values()}.values():
        variables = [v for owner, v in pending.values() if owner is strategy]
        broadcast_from_chief(strategy, variables)


def broadcast_from_chief(strategy: Any, variables: Sequence[Any]) -> None:
    # Sharded variables were the chief's when each worker took its shard.
    variables = [variable for variable in variables if not is_sharded(variable)]
    # A worker that reads in the middle of a scope has fewer variables than one at its
    # end. The remaining ones are made and broadcast later.
    while variables:
        group = strategy.extended.group
        num_synced = group.sync_initial_values(variables)
        group.shard_weights(variables[:num_synced])
        variables = variables[num_synced:]
