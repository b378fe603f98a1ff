"""Rows, state and recording of the step that a replica is in, and dry runs."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from keras import tree

APPLY = "optimizer.apply"


@contextlib.contextmanager
def override(state: Any, name: str, value: Any) -> Iterator[None]:
    """Context manager in which an attribute of an object has another value."""
    before = getattr(state, name)
    setattr(state, name, value)
    try:
        yield
    finally:
        setattr(state, name, before)


@dataclass(frozen=True, slots=True)
class RowRange:
    """A replica's rows of the global batch: numbers or scalar tensors."""

    begin: Any
    count: Any  # 1 for a stand-in row
    total: Any


# Begin and end of each local replica's rows in the global batch.
Bounds = list[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class LocalRows:
    """A worker's rows of a global batch, a leaf for `keras.tree`."""

    # One placeholder row where the worker has none.
    batch: Any
    bounds: Bounds
    global_rows: int
    # Of the row numbers of the global batch; None where workers cannot differ in them.
    order_checksum: int | None = None
    # By rank, where each worker reads its own data; None where all have the same.
    worker_rows: tuple[int, ...] | None = None
    # Of all rows of the batch, where this worker has read them.
    digest: str = ""


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
    # The name of `weighted_sum`: all replicas must sum the same variables' gradients.
    reduction: str = APPLY
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
    # Draws are equal on all replicas: for all rows, or for none.
    is_drawing: bool = False


@dataclass
class DryRun:
    """Findings of a dry run of a function, called as on one device."""

    # Its draws, in the dry run of a step.
    draws: list[Any] | None = None
    is_drawing: bool = False

    def draw_once(
        self, what: Any, draw: Callable[[], Any], skip: Callable[[], Any]
    ) -> Any:
        return draw()


@dataclass
class AppliedGradients:
    """The arguments of one call of `optimizer.apply`, summed over the replicas."""

    optimizer: Any
    gradients: list[Any]
    variables: list[Any] | None


@dataclass
class StepRecorder:
    """While one is active, optimizers do not apply the gradients that they receive."""

    applied: list[AppliedGradients] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # of checks at the step's end

    def add(self, optimizer: Any, gradients: list[Any], variables: Any) -> None:
        """Record gradients in place of `optimizer.apply`."""
        listed = None if variables is None else list(variables)
        self.applied.append(AppliedGradients(optimizer, gradients, listed))


class _ThreadRecording(threading.local):
    recorder: StepRecorder | None = None


# The recorder of this thread, if it is in no strategy; of replicas by their strategy's
# `id`.
thread_recording = _ThreadRecording()
replica_recorders: dict[int, StepRecorder] = {}


def active_recorder(strategy: Any = None) -> StepRecorder | None:
    """Return the recorder of a strategy's replicas; without one, of this thread."""
    if strategy is None:
        return thread_recording.recorder
    return replica_recorders.get(id(strategy))


@contextlib.contextmanager
def recording_replicas(strategy: Any, recorder: StepRecorder) -> Iterator[None]:
    """Context manager that records the replicas of a strategy."""
    replica_recorders[id(strategy)] = recorder
    try:
        yield
    finally:
        del replica_recorders[id(strategy)]
