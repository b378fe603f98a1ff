"""What is true of the training step that a replica is in."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class StepState:
    """The state of one replica's step; `rules` and the hooks read and write it.

    A replica always has one. In `strategy.run` the row weight is None, and only
    `applying` is of use.

    Attributes:
        row_weight: This replica's rows over those of the global batch, a number or a
            scalar tensor; see `rules.row_weights`.
        written: The variables that the step assigned, by `id`.
        applying: Whether an optimizer applies gradients that were summed already, so
            that all replicas compute on equal inputs.
        has_all_rows: Whether the loss that is computed now is given the rows of all
            replicas.
    """

    row_weight: Any = None
    written: dict[int, Any] = field(default_factory=dict)
    applying: bool = False
    has_all_rows: bool = False
