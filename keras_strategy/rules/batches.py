"""Batch rows of functions that `strategy.run` calls."""

from collections.abc import Callable, Sequence
from typing import Any

from keras import tree

from keras_strategy.core.context import DryRun
from keras_strategy.core.registry import get_engine
from keras_strategy.core.row_range import BatchRows, RowRange
from keras_strategy.core.step_state import StepState
from keras_strategy.rules.draws import BatchDimCache, settings
from keras_strategy.values.distributed import (
    DistributedValues,
    PerReplica,
)


def has_batch_rows(value: Any) -> bool:
    """Return True for a value from an element of a distributed dataset."""
    return isinstance(value, PerReplica) and value.batch is not None


def find_batch_rows(args: Sequence[Any], kwargs: dict[str, Any]) -> BatchRows | None:
    """Return the rows of the one distributed dataset element in the arguments.

    None if there is no element, or several (ambiguous for random numbers), or if
    replicas draw independently. It runs in every `run`, so it flattens only nested
    arguments.
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
            return find_batch_rows(tree.flatten((args, kwargs)), {})
    return found


def traced_step_state(
    rows: RowRange,
    draws: BatchDimCache,
    call: Callable[[Sequence[Any]], Any],
    leaves: Sequence[Any],
    places: Sequence[int],
) -> StepState:
    """Return the step state of a replica whose function is traced.

    Args:
        rows: The replica's rows.
        draws: The batch dimensions of the function's draws.
        call: Calls the function with replacements of `leaves`.
        leaves: The leaves of the replica's arguments.
        places: The indices of leaves with batch rows.
    """

    def dry_run(few: int) -> DryRun:
        def with_others(*others):
            given = list(leaves)
            for place, other in zip(places, others, strict=True):
                given[place] = other
            call(given)

        return get_engine().dry_run(
            with_others, tuple(leaves[place] for place in places), {}, few
        )

    return StepState(rows=rows, draws=draws, dry_run=dry_run)


def traced_run_state(
    fn: Callable[..., Any],
    arguments: Any,
    rows: RowRange,
    index: int,
    draws: BatchDimCache,
) -> StepState:
    """Return `traced_step_state` for a function and the arguments of `run`.

    Args:
        fn: The function.
        arguments: `(args, kwargs)`, with distributed values.
        rows: The replica's rows.
        index: The replica's index on this worker.
        draws: The batch dimensions of the function's draws.
    """
    leaves = tree.flatten(arguments)
    places = [place for place, leaf in enumerate(leaves) if has_batch_rows(leaf)]
    own = [
        leaf.values[index] if isinstance(leaf, DistributedValues) else leaf
        for leaf in leaves
    ]

    def call(given):
        args, kwargs = tree.pack_sequence_as(arguments, given)
        fn(*args, **kwargs)

    return traced_step_state(rows, draws, call, own, places)
