"""Random numbers of one device, sliced by rows.

One device draws a tensor for the global batch. A replica whose rows are known draws the
same tensor from the same seed, and takes the slice of its rows. Which dimension of a
draw is the batch dimension cannot be read off its size (8 units and 8 rows look alike).
So the first draw of a step triggers two dry runs of it, with 2 rows and with 3, as on
one device, up to the request for gradients, with assignments discarded. The dimension
that grew is the batch dimension; a draw of equal shape is independent of rows and equal
on all replicas. Unclear cases are warned of.

A batch dimension with several entries for each row, as after `ops.reshape(x, (-1, n))`,
is taken to hold each row's entries contiguously; a warning says so once.
"""

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import keras
from keras import ops

from keras_strategy.core.context import DryRun
from keras_strategy.core.step_state import RowRange, replica_recorders
from keras_strategy.errors import logger
from keras_strategy.training.reduction import may_be_same

# The numbers of rows of the two dry runs.
_ROWS = (2, 3)
# Pairs of dry runs, at draws that were unknown before.
_MAX_DRY_RUNS = 3

Dims = tuple[int | None, ...]
"""The shape of a draw, with None for sizes that tracing does not know."""


class EndOfDryRun(Exception):
    """End of a dry run, before a side effect that cannot be discarded."""


# Set by `keras_strategy.config`: whether replicas draw one device's numbers.
settings = SimpleNamespace(exact=True)


@dataclass(frozen=True)
class RandomDraw:
    """Draw of random numbers in a dry run."""

    key: Any  # see `draw_key`
    dims: Dims
    # The axes in memory order, where that decides which numbers are drawn.
    order: tuple[int, ...] | None = None


@dataclass(frozen=True)
class BatchDim:
    """Batch dimension of a draw, with the number of entries for each row."""

    axis: int
    per_row: int = 1
    # That of the draw; a batch of one row may not show it.
    order: tuple[int, ...] | None = field(default=None, compare=False)


Kind = BatchDim | Dims
"""The batch dimension of a draw, or its shape if that is independent of the rows."""


class BatchDimCache:
    """Cache of the batch dimensions of a step's draws."""

    def __init__(self, repeated: bool = False):
        self._repeated = repeated  # the dry-run function may run again in a step
        # For each key, kinds in the order of the step's draws; None if unclear.
        self._kinds: dict[Any, list[Kind | None]] = {}
        self._dry_runs = 0
        self._warned: set[Any] = set()

    def batch_dim(
        self,
        drawn: RandomDraw,
        number: int,
        rows: int | None,
        dry_run: Callable[[int], DryRun] | None,
    ) -> BatchDim | None:
        """Return the batch dimension of the `number`-th draw of a key, or None."""
        key, dims = drawn.key, drawn.dims
        if rows is None:  # unknown during tracing
            may_have_rows = bool(dims)
        elif rows == 0:
            may_have_rows = 0 in dims
        else:
            may_have_rows = any(size is None or size % rows == 0 for size in dims)
        if not may_have_rows:
            return None
        is_known = key in self._kinds or self._dry_runs >= _MAX_DRY_RUNS
        if not is_known and dry_run is not None:
            self._dry_runs += 1
            runs = [dry_run(num_rows).draws or [] for num_rows in _ROWS]
            for new in {draw.key for draw in itertools.chain(*runs)}:
                small, large = [[d for d in run if d.key == new] for run in runs]
                kinds = map(_kind, small, large)
                is_clear = len(small) == len(large)
                self._kinds.setdefault(new, list(kinds) if is_clear else [None])
        kinds = self._kinds.get(key, [])
        fitting = {kind for kind in kinds if kind and _fits(kind, dims, rows)}
        if self._repeated and kinds:
            number %= len(kinds)
        expected = kinds[number] if number < len(kinds) else None
        if len(fitting) > 1 and number < len(kinds):
            fitting &= {expected}  # equal sizes by chance: go by the order in the step
        if len(fitting) != 1 or None in kinds:
            self._warn(
                key,
                "%s draws random numbers of the shape %s, and its batch dimension "
                "could not be determined. The first dimension is used if its size "
                "fits. Several replicas may draw other numbers than one device.",
                dims,
            )
            guess = BatchDim(0)
            return guess if _fits(guess, dims, rows) else None
        (kind,) = fitting
        if not isinstance(kind, BatchDim):
            return None
        if kind.per_row > 1:
            self._warn(
                (key, "several"),
                "%s draws %d random numbers or more for each row of a batch. This "
                "library assumes that those of a row are contiguous, as after "
                "`ops.reshape(x, (-1, ...))` with the batch dimension first. If "
                "the batch dimension is not first, replicas draw other numbers "
                "than one device: draw before you merge the dimensions.",
                kind.per_row,
            )
        # It may differ in `order`.
        return expected if isinstance(expected, BatchDim) and expected == kind else kind

    def for_current_layer(self, rows: RowRange) -> "BatchDimCache | None":
        """Return the cache for the current draw; None to draw independently."""
        return self

    def warn_shuffled_rows(self, seed: Any) -> None:
        self._warn(
            ("shuffle", seed),
            "%s shuffles the rows of a batch. Several replicas shuffle their local "
            "rows only, where one device shuffles all rows.",
        )

    def _warn(self, key: Any, message: str, *args: Any) -> None:
        if key in self._warned or replica_recorders:  # the step itself follows
            return
        self._warned.add(key)
        frame, drawing = sys._getframe(1), "The step"
        while frame is not None:
            owner: Any = frame.f_locals.get("self")
            if isinstance(owner, keras.Layer):
                drawing = f"The layer '{owner.name}'"
                break
            frame = frame.f_back
        logger.warning(message, drawing, *args)


def _kind(small: RandomDraw, large: RandomDraw) -> Kind | None:
    """Return the kind of a draw from those of two dry runs; None if unclear."""
    if len(small.dims) != len(large.dims):
        return None
    sizes = list(zip(small.dims, large.dims, strict=True))
    grown = [axis for axis, (size, other) in enumerate(sizes) if size != other]
    if not grown:
        return small.dims
    size, other = sizes[grown[0]]
    if len(grown) > 1 or size is None or other is None:
        return None
    per_row = size // _ROWS[0]
    if (size, other) != (per_row * _ROWS[0], per_row * _ROWS[1]):
        return None
    return BatchDim(grown[0], per_row, small.order)


def _fits(kind: Kind, dims: Dims, rows: int | None) -> bool:
    """Return True if a draw may be of this kind."""
    if not isinstance(kind, BatchDim):
        return may_be_same(kind, dims)
    if kind.axis >= len(dims):
        return False
    size = dims[kind.axis]
    return size is None if rows is None else size == kind.per_row * rows


def draw_key(name: str, seed: Any, rank: int) -> Any:
    """Return the key of draws of one function, seed and rank."""
    generator = seed if isinstance(seed, keras.random.SeedGenerator) else None
    return name, generator, seed is None, rank


def global_shape(dims: Sequence[Any], batch_dim: BatchDim, rows: RowRange) -> list[Any]:
    """Return the shape that one device draws."""
    total = list(dims)
    total[batch_dim.axis] = rows.total * batch_dim.per_row
    return total


def local_slice(numbers: Any, batch_dim: BatchDim, rows: RowRange) -> Any:
    """Return the slice of one device's draw for a replica's rows."""
    begin = rows.begin * batch_dim.per_row
    count = rows.count * batch_dim.per_row
    if isinstance(count, int) and not isinstance(begin, int):
        # In a program for all replicas, or if tracing knows some sizes only.
        start, shape = [0] * len(numbers.shape), list(ops.shape(numbers))
        start[batch_dim.axis], shape[batch_dim.axis] = begin, count
        return ops.slice(numbers, start, shape)
    end = begin + count
    return numbers[(slice(None),) * batch_dim.axis + (slice(begin, end),)]
