"""Rows and state of the training step that a replica is in, and of a dry run."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from keras import tree


@dataclass(frozen=True, slots=True)
class RowRange:
    """A replica's rows of the global batch: numbers or scalar tensors."""

    begin: Any
    count: Any  # 1 for a stand-in row
    total: Any


class BatchRows:
    """Row counts of one element of a distributed dataset, attached to its values."""

    # One is made for every element: class attributes avoid a call of `__init__`.
    # Rows of each replica on all workers; None if the values have them.
    counts: tuple[int, ...] | None = None
    # Index of this worker's first replica.
    first: int = 0


@functools.lru_cache(maxsize=128)
def row_ranges(counts: tuple[int, ...]) -> list[RowRange]:
    """Return the rows of each replica, from the number of rows of each."""
    return [
        RowRange(sum(counts[:replica]), count, sum(counts))
        for replica, count in enumerate(counts)
    ]


def has_rows(x: Any) -> bool:
    """Return True for an array with a dimension that may be the batch dimension."""
    return len(getattr(x, "shape", ())) > 0


def map_rows(take: Callable[[Any], Any], structure: Any) -> Any:
    """Apply a function to the arrays with rows in a structure."""
    return tree.map_structure(lambda x: take(x) if has_rows(x) else x, structure)


def draw_alone(what: Any, draw: Callable[[], Any], skip: Callable[[], Any]) -> Any:
    """Implement `Replica.draw_once` where no other replica's numbers are copied."""
    return draw()


@dataclass(slots=True)
class StepState:
    """State of one replica's step, which `training` and the patches read and write."""

    # Local rows / global rows, a number or scalar tensor; see training/row_weights.py.
    # In `strategy.run` it is None, and only `is_applying` is used.
    row_weight: Any = None
    # Mirrored variables without an aggregation that the step assigned, by `id`.
    assigned: dict[int, Any] = field(default_factory=dict)
    # Mirrored variables of aggregation "sum" that it read, by `id`.
    sum_variables_read: set[int] = field(default_factory=set)
    # Sync-on-read variables assigned since the last merge, by `id`; and their values
    # merged over all replicas, if read in the step and unchanged since.
    on_read_writes: dict[int, Any] = field(default_factory=dict)
    on_read_merged: dict[int, Any] = field(default_factory=dict)
    # An optimizer applies reduced gradients, so all replicas compute on equal inputs.
    is_applying: bool = False
    # The variables whose gradients are being reduced, and the optimizer that gets them.
    reducing_gradients_of: Sequence[Any] | None = None
    optimizer: Any = None
    # A loss is computed from the rows of all replicas.
    has_all_rows: bool = False
    # The step returns `get_metrics_result()`: call it again after all replicas' steps.
    logs_are_metrics: bool = False
    # This replica's rows of the global batch; None if unknown.
    rows: RowRange | None = None
    # Batch dimensions of the step's random draws, and the draws so far, by kind.
    draws: Any = None
    draw_counts: dict[Any, int] = field(default_factory=dict)
    # Dry-runs the step with a number of rows.
    dry_run: Callable[[int], Any] | None = None
    # A draw is for all rows or for none.
    is_drawing: bool = False


@dataclass
class DryRun:
    """Findings of a dry run of a function, called as on one device."""

    # Its draws, in the dry run of a step.
    draws: list[Any] | None = None
    is_drawing: bool = False

    draw_once = staticmethod(draw_alone)
