"""Initial values, until every worker has the chief's.

Workers may draw or compute different initial values. One broadcast covers all variables
of a scope: at its end, or before the first read or `run`.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from keras_strategy.rules.sharding import is_sharded

# The variables that wait for the chief's values, with their strategies.
pending_values: list[tuple[Any, Any]] = []


def register_initial_value(strategy: Any, variable: Any) -> None:
    """Register a variable that got its initial value in a scope of several workers."""
    pending_values.append((strategy, variable))


@contextlib.contextmanager
def without_broadcast() -> Iterator[None]:
    """Context manager that suspends the broadcast while tensors are only passed on."""
    held = pending_values[:]
    pending_values.clear()
    try:
        yield
    finally:
        pending_values[:0] = held


def broadcast_pending_values() -> None:
    """Broadcast the chief's values of pending variables; a collective call."""
    # Keras may initialize a variable again, and the first read must not come back here.
    made = {id(variable): (strategy, variable) for strategy, variable in pending_values}
    pending_values.clear()
    while made:
        first, _ = next(iter(made.values()))
        broadcast_from_chief(first, [v for strategy, v in made.values() if strategy is first])
        made = {key: pair for key, pair in made.items() if pair[0] is not first}


def broadcast_from_chief(strategy: Any, variables: Sequence[Any]) -> None:
    """Give variables of a strategy the chief's values.

    A worker that reads in the middle of a scope has fewer variables than one at its
    end. The remaining ones are made and broadcast later.
    """
    # What is split was the chief's when each worker took its part.
    variables = [variable for variable in variables if not is_sharded(variable)]
    while variables:
        settled = strategy.extended.group.sync_initial_values(variables)
        variables = variables[settled:]
