"""Of which batch a function that `strategy.run` calls is given the rows."""

from collections.abc import Callable, Sequence
from typing import Any

from keras import tree

from keras_strategy.core.context import Trial
from keras_strategy.core.registry import get_engine
from keras_strategy.core.row_range import BatchRows, RowRange
from keras_strategy.core.step_state import StepState
from keras_strategy.rules.draws import KnownDraws, settings
from keras_strategy.values.distributed import (
    DistributedValues,
    PerReplica,
)


def carries_rows(value: Any) -> bool:
    """Whether a value is of an element of a distributed dataset."""
    return isinstance(value, PerReplica) and value.batch is not None


def batch_of(args: Sequence[Any], kwargs: dict[str, Any]) -> BatchRows | None:
    """The element of a distributed dataset whose rows are among some arguments.

    It is asked in every call of `run`, and calls nothing where there are no structures.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        The element's rows. None if there is no element, or more than one: then it is
        not known of which one a random number belongs to a row. And None where
        replicas draw their own numbers anyway.
    """
    if not settings.exact:
        return None
    found = None
    for leaf in (*args, *kwargs.values()):
        if isinstance(leaf, PerReplica):
            if leaf.batch is None or leaf.batch is found:
                continue
            if found is not None:
                return None
            found = leaf.batch
        elif isinstance(leaf, tuple | list | dict):
            return batch_of(tree.flatten((args, kwargs)), {})
    return found


def traced_step(
    rows: RowRange,
    draws: KnownDraws,
    call: Callable[[Sequence[Any]], Any],
    leaves: Sequence[Any],
    places: Sequence[int],
) -> StepState:
    """What is true of a replica whose function is traced, and may be traced again.

    Args:
        rows: The replica's rows.
        draws: What is known of the function's draws.
        call: Calls the function, given what is in the place of `leaves`.
        leaves: What the replica's function is given.
        places: Those of the rows among them.
    """

    def rehearse(few: int) -> Trial:
        def with_others(*others):
            given = list(leaves)
            for place, other in zip(places, others, strict=True):
                given[place] = other
            call(given)

        return get_engine().rehearse(
            with_others, tuple(leaves[place] for place in places), {}, few
        )

    return StepState(rows=rows, draws=draws, rehearse=rehearse)


def traced_step_of(
    fn: Callable[..., Any],
    arguments: Any,
    rows: RowRange,
    index: int,
    draws: KnownDraws,
) -> StepState:
    """As `traced_step`, of a function and the arguments that `run` was given.

    Args:
        fn: The function.
        arguments: `(args, kwargs)`, with distributed values.
        rows: The rows of the replica.
        index: The number of the replica on this worker.
        draws: What is known of the function's draws.
    """
    leaves = tree.flatten(arguments)
    places = [place for place, leaf in enumerate(leaves) if carries_rows(leaf)]
    own = [
        leaf.values[index] if isinstance(leaf, DistributedValues) else leaf
        for leaf in leaves
    ]

    def call(given):
        args, kwargs = tree.pack_sequence_as(arguments, given)
        fn(*args, **kwargs)

    return traced_step(rows, draws, call, own, places)
