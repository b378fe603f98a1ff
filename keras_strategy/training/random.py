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

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras

from keras_strategy.core.context import DryRun
from keras_strategy.core.protocols import Replica
from keras_strategy.core.step_state import RowRange

logger = logging.getLogger("keras_strategy")

# The numbers of rows of the two dry runs.
_ROWS = (2, 3)
# Pairs of dry runs, at draws that were unknown before.
_MAX_DRY_RUNS = 3

Dims = tuple[int | None, ...]
"""The shape of a draw, with None for sizes that tracing does not know."""

DryRunFunction = Callable[[int], DryRun]


class EndOfDryRun(Exception):
    """End of a dry run, before a side effect that cannot be discarded."""


@dataclass
class RandomSettings:
    """Settings from `keras_strategy.config`.

    Attributes:
        exact: True if replicas draw one device's numbers.
    """

    exact: bool = True


settings = RandomSettings()


@dataclass(frozen=True)
class RandomDraw:
    """Draw of random numbers in a dry run.

    Attributes:
        key: Equal for draws of one kind, see `key_of`.
        dims: The shape.
        order: The axes in memory order, where that decides which numbers are drawn.
    """

    key: Any
    dims: Dims
    order: tuple[int, ...] | None = None


@dataclass(frozen=True)
class BatchDim:
    """Batch dimension of a draw.

    Attributes:
        axis: The dimension.
        per_row: The number of entries for each row.
        order: See `Drawn`. A batch of one row may not show it.
    """

    axis: int
    per_row: int = 1
    order: tuple[int, ...] | None = field(default=None, compare=False)

    def fits(self, dims: Dims, rows: int | None) -> bool:
        """Return True if a draw may have this batch dimension."""
        if self.axis >= len(dims):
            return False
        size = dims[self.axis]
        return size is None if rows is None else size == self.per_row * rows


@dataclass(frozen=True)
class FixedShape:
    """Shape of a draw that is independent of the rows."""

    dims: Dims

    def fits(self, dims: Dims, rows: int | None) -> bool:
        """Return True if a draw may have this shape."""
        return len(dims) == len(self.dims) and all(
            a == b or a is None or b is None
            for a, b in zip(dims, self.dims, strict=True)
        )


Kind = BatchDim | FixedShape


class BatchDimCache:
    """Cache of the batch dimensions of a step's draws.

    `repeated` is True if the dry-run function may run several times in a step.
    """

    def __init__(self, repeated: bool = False):
        self._repeated = repeated
        # For each key, kinds in the order of the step's draws; None if unclear.
        self._kinds: dict[Any, list[Kind | None]] = {}
        self._dry_runs = 0
        self._warned: set[Any] = set()

    def batch_dim(
        self,
        drawn: RandomDraw,
        number: int,
        rows: int | None,
        dry_run: DryRunFunction | None,
    ) -> BatchDim | None:
        """Return the batch dimension of a draw, or None.

        Args:
            drawn: The draw.
            number: The number of earlier draws of this key in the step.
            rows: The replica's rows; None if unknown during tracing.
            dry_run: Runs the step on a number of rows as on one device.
        """
        key, dims = drawn.key, drawn.dims
        if not _may_follow(dims, rows):
            return None
        if (
            key not in self._kinds
            and dry_run is not None
            and self._dry_runs < _MAX_DRY_RUNS
        ):
            self._dry_runs += 1
            smaller, larger = [_by_key(dry_run(n).draws) for n in _ROWS]
            for new in smaller.keys() | larger.keys():
                kinds = _kinds(smaller.get(new, []), larger.get(new, []))
                self._kinds.setdefault(new, kinds)
        kinds = self._kinds.get(key, [])
        fitting = {kind for kind in kinds if kind and kind.fits(dims, rows)}
        if self._repeated and kinds:
            number %= len(kinds)
        if len(fitting) > 1 and number < len(kinds):
            # Equal sizes by chance: use the kind at this position in the step.
            fitting &= {kinds[number]}
        if len(fitting) == 1 and None not in kinds:
            (kind,) = fitting
            if isinstance(kind, FixedShape):
                return None
            expected = kinds[number] if number < len(kinds) else None
            if expected == kind and isinstance(expected, BatchDim):
                kind = expected  # it may differ in `order`
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
            return kind
        self._warn(
            key,
            "%s draws random numbers of the shape %s, and its batch dimension could "
            "not be determined. The first dimension is used if its size fits. Several "
            "replicas may draw other numbers than one device.",
            dims,
        )
        guess = BatchDim(0)
        return guess if guess.fits(dims, rows) else None

    def for_current_layer(self, rows: RowRange) -> "BatchDimCache | None":
        """Return the cache for the current draw; None to draw independently."""
        return self

    def warn_shuffled_rows(self, seed: Any) -> None:
        """Warn that each replica shuffles only its local rows."""
        self._warn(
            ("shuffle", seed),
            "%s shuffles the rows of a batch. Several replicas shuffle their local "
            "rows only, where one device shuffles all rows.",
        )

    def _warn(self, key: Any, message: str, *args: Any) -> None:
        if key not in self._warned:
            self._warned.add(key)
            logger.warning(message, drawing_layer_name(), *args)


def _may_follow(dims: Dims, rows: int | None) -> bool:
    """Return True if a dimension may be the batch dimension."""
    if rows is None:
        return bool(dims)
    if rows == 0:
        return 0 in dims
    return any(size is None or size % rows == 0 for size in dims)


def _by_key(draws: Sequence[RandomDraw] | None) -> dict[Any, list[RandomDraw]]:
    found: dict[Any, list[RandomDraw]] = {}
    for drawn in draws or ():
        found.setdefault(drawn.key, []).append(drawn)
    return found


def _kinds(
    smaller: Sequence[RandomDraw], larger: Sequence[RandomDraw]
) -> list[Kind | None]:
    """Return the kinds of draws from two dry runs; None where unclear."""
    if len(smaller) != len(larger):
        return [None]
    pairs = zip(smaller, larger, strict=True)
    return [_kind(a.dims, b.dims, a.order) for a, b in pairs]


def _kind(smaller: Dims, larger: Dims, order: tuple[int, ...] | None) -> Kind | None:
    if len(smaller) != len(larger):
        return None
    grown = [axis for axis, size in enumerate(smaller) if size != larger[axis]]
    if not grown:
        return FixedShape(smaller)
    if len(grown) > 1:
        return None
    (axis,) = grown
    small, large = smaller[axis], larger[axis]
    if small is None or large is None or small % _ROWS[0]:
        return None
    per_row = small // _ROWS[0]
    batch_dim = BatchDim(axis, per_row, order)
    return batch_dim if large == per_row * _ROWS[1] else None


def draw_key(name: str, seed: Any, rank: int) -> Any:
    """Return the key of draws of one function, seed and rank.

    A generator is part of it, which keeps it alive, so that its `id` is not reused.
    """
    generator = seed if isinstance(seed, keras.random.SeedGenerator) else None
    return name, generator, seed is None, rank


def drawing_layer_name() -> str:
    """Return the innermost running layer, for a message."""
    frame = sys._getframe(1)
    while frame is not None:
        owner: Any = frame.f_locals.get("self")
        if isinstance(owner, keras.Layer):
            return f"The layer '{owner.name}'"
        frame = frame.f_back
    return "The step"


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
        start, shape = [0] * len(numbers.shape), list(keras.ops.shape(numbers))
        start[batch_dim.axis], shape[batch_dim.axis] = begin, count
        return keras.ops.slice(numbers, start, shape)
    end = begin + count
    return numbers[(slice(None),) * batch_dim.axis + (slice(begin, end),)]


def gather_rows(replica: Replica, x: Any, axis: int) -> Any:
    """Gather a tensor's rows of all replicas along `axis`."""
    weight = replica.step.row_weight
    if isinstance(weight, float) and weight == 0.0:
        # A replica without rows computes on placeholder rows.
        x = x[(slice(None),) * axis + (slice(0, 0),)]
    elif weight is not None and not isinstance(weight, float):
        size = keras.ops.shape(x)[axis]
        count = keras.ops.where(weight > 0, size, 0)
        x = x[(slice(None),) * axis + (slice(0, count),)]
    return replica.all_gather(x, axis)
