"""What is true of the training step that a replica is in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from keras_strategy.core.row_range import RowRange


@dataclass(slots=True)
class StepState:
    """The state of one replica's step; `rules` and the hooks read and write it.

    A replica always has one. In `strategy.run` the row weight is None, and only
    `applying` is of use.

    Attributes:
        row_weight: This replica's rows over those of the global batch, a number or a
            scalar tensor; see `rules.row_weights`.
        assigned: The mirrored variables without an aggregation that the step assigned,
            by `id`.
        read: The mirrored variables of aggregation "sum" that it has read, by `id`.
        parts: The on_read variables that the step assigned and that were not merged
            since, by `id`.
        merged: What on_read variables hold over all replicas, by `id`, where that was
            asked for in the step and has not changed since.
        applying: Whether an optimizer applies gradients that were summed already, so
            that all replicas compute on equal inputs.
        gradients_of: What an optimizer has gradients of, while they are summed; None
            where it is something else that is summed.
        optimizer: What is to be given their sums, meanwhile.
        has_all_rows: Whether the loss that is computed now is given the rows of all
            replicas.
        logs_are_metrics: Whether what the step returns is `get_metrics_result`'s, which
            is asked for again when all replicas have come to its end.
        rows: Which rows of the global batch are this replica's; None where that is not
            known.
        draws: What is known of the random numbers that the step draws.
        drawn: How often the step has drawn, by kind.
        rehearse: See `rules.draws.Rehearse`.
        drawing: Whether numbers are drawn now, for all rows or for none.
        warn_unless: Takes a function that is called in a loop's first step and gives
            whether something holds, and what warns if not; None where nothing is to
            be tried, see `rules.row_trials`.
    """

    row_weight: Any = None
    assigned: dict[int, Any] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)
    parts: dict[int, Any] = field(default_factory=dict)
    merged: dict[int, Any] = field(default_factory=dict)
    applying: bool = False
    gradients_of: Sequence[Any] | None = None
    optimizer: Any = None
    has_all_rows: bool = False
    logs_are_metrics: bool = False
    rows: RowRange | None = None
    draws: Any = None
    drawn: dict[Any, int] = field(default_factory=dict)
    rehearse: Callable[[int], Any] | None = None
    drawing: bool = False
    warn_unless: Callable[[Callable[[], Any], Callable[[], None]], None] | None = None
