"""Variables that have got their first value, until every worker has the chief's.

Workers may draw or compute other values. They agree once for all variables that a scope
makes, and not for each: when the scope ends; or before, when somebody reads one of
them, or a function is about to run on the replicas.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from keras_strategy.rules.sharding import is_split

# The variables that wait for the chief's values, with their strategies.
waiting: list[tuple[Any, Any]] = []


def note(strategy: Any, variable: Any) -> None:
    """Notes that a variable has got its first value in a scope of several workers."""
    waiting.append((strategy, variable))


@contextlib.contextmanager
def unread() -> Iterator[None]:
    """Surrounds what hands variables' tensors on, and does not look into them."""
    held = waiting[:]
    waiting.clear()
    try:
        yield
    finally:
        waiting[:0] = held


def settle() -> None:
    """Gives the variables that wait the chief's values; all workers get here."""
    # Keras may initialize a variable again, and the first read must not come back here.
    made = {id(variable): (strategy, variable) for strategy, variable in waiting}
    waiting.clear()
    while made:
        first, _ = next(iter(made.values()))
        take_chiefs(first, [v for strategy, v in made.values() if strategy is first])
        made = {key: pair for key, pair in made.items() if pair[0] is not first}


def take_chiefs(strategy: Any, variables: Sequence[Any]) -> None:
    """Gives variables of a strategy the chief's values.

    A worker that reads in the middle of a scope brings fewer variables than one that
    has come to its end. What is left there is what the others make and bring later.
    """
    # What is split was the chief's when each worker took its part.
    variables = [variable for variable in variables if not is_split(variable)]
    while variables:
        settled = strategy.extended.group.take_first(variables)
        variables = variables[settled:]
