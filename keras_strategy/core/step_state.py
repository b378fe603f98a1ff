"""Rows and state of the training step that a replica is in, and of a dry run."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RowRange:
    """The rows of the global batch that a replica works on.

    Attributes:
        begin: Index of the first row. A number or a scalar tensor, like the others.
        count: The number of rows; 1 for a stand-in row.
        total: Rows of the global batch.
    """

    begin: Any
    count: Any
    total: Any


class BatchRows:
    """Row counts of one element of a distributed dataset, attached to its values.

    One is made for every element; class attributes avoid a call of `__init__`.

    Attributes:
        counts: Rows of each replica on all workers; None if the values have them.
        first: Index of this worker's first replica.
    """

    counts: tuple[int, ...] | None = None
    first: int = 0


@functools.lru_cache(maxsize=128)
def row_ranges(counts: tuple[int, ...]) -> list[RowRange]:
    """Return the rows of each replica, from the number of rows of each."""
    return [
        RowRange(sum(counts[:replica]), count, sum(counts))
        for replica, count in enumerate(counts)
    ]


@dataclass(slots=True)
class StepState:
    """State of one replica's step, which `training` and the patches read and write.

    In `strategy.run` the row weight is None, and only `is_applying` is used.

    Attributes:
        row_weight: Local rows / global rows, a number or a scalar tensor; see
            `training/row_weights.py`.
        assigned: Mirrored variables without an aggregation that the step assigned, by
            `id`.
        sum_variables_read: Mirrored variables of aggregation "sum" that it read, by
            `id`.
        on_read_writes: Sync-on-read variables assigned since the last merge, by `id`.
        on_read_merged: Values of sync-on-read variables merged over all replicas, by
            `id`, if read in the step and unchanged since.
        is_applying: True while an optimizer applies reduced gradients, so that all
            replicas compute on equal inputs.
        reducing_gradients_of: Variables whose gradients are being reduced; None while
            other values are.
        optimizer: The optimizer that gets these gradients.
        has_all_rows: True while a loss is computed from the rows of all replicas.
        logs_are_metrics: True if the step returns `get_metrics_result()`, which is
            called again when all replicas have finished the step.
        rows: This replica's rows of the global batch; None if unknown.
        draws: Batch dimensions of the step's random draws.
        draw_counts: Number of draws so far, by kind.
        dry_run: Dry-runs the step with a number of rows.
        is_drawing: True while a draw is for all rows or for none.
        warn_unless: Called in the first step of a loop with a function that returns a
            condition, and one that warns if it is false; None if nothing is to be
            tested, see `training/audit.py`.
    """

    row_weight: Any = None
    assigned: dict[int, Any] = field(default_factory=dict)
    sum_variables_read: set[int] = field(default_factory=set)
    on_read_writes: dict[int, Any] = field(default_factory=dict)
    on_read_merged: dict[int, Any] = field(default_factory=dict)
    is_applying: bool = False
    reducing_gradients_of: Sequence[Any] | None = None
    optimizer: Any = None
    has_all_rows: bool = False
    logs_are_metrics: bool = False
    rows: RowRange | None = None
    draws: Any = None
    draw_counts: dict[Any, int] = field(default_factory=dict)
    dry_run: Callable[[int], Any] | None = None
    is_drawing: bool = False
    warn_unless: Callable[[Callable[[], Any], Callable[[], None]], None] | None = None


@dataclass
class DryRun:
    """Findings of a dry run of a function, called as on one device.

    Attributes:
        depends_on_replicas: True if the function, or a rule of ours that does not take
            part in the dry run, depends on the other replicas.
        drew_random: True if it drew random numbers.
        row_fraction: Fraction of all rows that it is called with.
        draws: Its draws, in the dry run of a step.
        gradients: Gradients passed to optimizers, which do not apply them; None if
            the dry run ends at the first optimizer.
        is_drawing: True while it draws.
        tests_row_independence: True while checking that outputs are row-independent.
            Keras's own layers are known to be, and are skipped.
        step: Stands in for the replica's `StepState` where its rows are drawn as on
            one device.
    """

    depends_on_replicas: bool = False
    drew_random: bool = False
    row_fraction: float = 1.0
    draws: list[Any] | None = None
    gradients: list[Any] | None = None
    is_drawing: bool = False
    tests_row_independence: bool = False
    step: Any = None

    def draw_once(self, what: Any, draw: Callable[[], Any], skip: Any) -> Any:
        """Call `draw`, as `Replica.draw_once` does on one replica."""
        return draw()
