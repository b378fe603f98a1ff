"""Which of one device's random numbers are those of a replica's rows.

One device draws a tensor of numbers for the whole batch. A replica whose rows are known
draws the same, from the same seed, and takes what belongs to its rows. For that it must
be known which dimension of a draw follows the rows. A number does not tell: a layer of
8 units and 8 rows look alike. So it is tried: at the first draw of a step, the step is
rehearsed with 2 rows and with 3, as on one device, until it asks for gradients. What it
assigns there is forgotten. Of each draw the dimension that grew with the rows is the
one that follows them; a draw of the same shape in both belongs to no row, and is the
same on all replicas. What cannot be told so is warned of.

Where a dimension has several entries for each row, as after `ops.reshape(x, (-1, n))`,
those of one row are taken to follow one another, which a warning says once.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras

from keras_strategy.core.context import Trial
from keras_strategy.core.protocol import Replica
from keras_strategy.core.row_range import RowRange

logger = logging.getLogger("keras_strategy")

# How many rows a step is rehearsed with.
_ROWS = (2, 3)
# So often a step is rehearsed that draws what it did not draw before.
_REHEARSALS = 3

Dims = tuple[int | None, ...]
"""The shape of a draw, with None for what is not known while Python runs."""

Rehearse = Callable[[int], Trial]


class EndOfRehearsal(Exception):
    """Ends a rehearsal, where going on would leave something behind."""


@dataclass
class Settings:
    """What `keras_strategy.config` sets.

    Attributes:
        exact: Whether replicas draw one device's numbers.
    """

    exact: bool = True


settings = Settings()


@dataclass(frozen=True)
class Drawn:
    """A draw in a rehearsal.

    Attributes:
        key: What draws of one kind have in common.
        dims: Its shape.
        order: Its axes as they lie in memory, where that decides what is drawn.
    """

    key: Any
    dims: Dims
    order: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Follows:
    """A dimension that follows the rows.

    Attributes:
        axis: Which one.
        per_row: How many entries each row has.
        order: See `Drawn`. A batch of one row may not show it.
    """

    axis: int
    per_row: int = 1
    order: tuple[int, ...] | None = field(default=None, compare=False)

    def fits(self, dims: Dims, rows: int | None) -> bool:
        """Whether a draw can be of this kind, given the replica's rows."""
        if self.axis >= len(dims):
            return False
        size = dims[self.axis]
        return size is None if rows is None else size == self.per_row * rows


@dataclass(frozen=True)
class Fixed:
    """A shape that does not depend on the rows."""

    dims: Dims

    def fits(self, dims: Dims, rows: int | None) -> bool:
        """Whether a draw can be of this kind."""
        return len(dims) == len(self.dims) and all(
            a == b or a is None or b is None
            for a, b in zip(dims, self.dims, strict=True)
        )


Kind = Follows | Fixed


class KnownDraws:
    """What is known of the draws of a step, from one call of it to the next.

    Args:
        repeated: Whether what is rehearsed may be called several times in a step.
    """

    def __init__(self, repeated: bool = False):
        self._repeated = repeated
        # Of each kind of draws, in the order of a step; None for what is unclear.
        self._kinds: dict[Any, list[Kind | None]] = {}
        self._rehearsals = 0
        self._warned: set[Any] = set()

    def follows(
        self,
        drawn: Drawn,
        number: int,
        rows: int | None,
        rehearse: Rehearse | None,
    ) -> Follows | None:
        """Which dimension of a draw follows the rows, if one does.

        Args:
            drawn: The draw.
            number: How many draws with its key came before it in the step.
            rows: The replica's rows, None if that is not known while Python runs.
            rehearse: Calls the step with a number of rows as on one device.
        """
        key, dims = drawn.key, drawn.dims
        if not _may_follow(dims, rows):
            return None
        if (
            key not in self._kinds
            and rehearse is not None
            and self._rehearsals < _REHEARSALS
        ):
            self._rehearsals += 1
            few, more = [_by_key(rehearse(n).draws) for n in _ROWS]
            for found in few.keys() | more.keys():
                kinds = _kinds(few.get(found, []), more.get(found, []))
                self._kinds.setdefault(found, kinds)
        kinds = self._kinds.get(key, [])
        fitting = {kind for kind in kinds if kind and kind.fits(dims, rows)}
        if self._repeated and kinds:
            number %= len(kinds)
        if len(fitting) > 1 and number < len(kinds):
            # As long as each other, by chance: that which is drawn at this point.
            fitting &= {kinds[number]}
        if len(fitting) == 1 and None not in kinds:
            (kind,) = fitting
            if isinstance(kind, Fixed):
                return None
            here = kinds[number] if number < len(kinds) else None
            if here == kind and isinstance(here, Follows):
                kind = here  # its order
            if kind.per_row > 1:
                self._warn(
                    (key, "several"),
                    "%s draws %d random numbers or more for each row of a batch. They "
                    "are taken to follow one another, as `ops.reshape(x, (-1, ...))` "
                    "puts them, where a dimension of steps comes after the rows. Where "
                    "it comes before them, replicas draw other numbers than one "
                    "device: draw before the dimensions are joined.",
                    kind.per_row,
                )
            return kind
        self._warn(
            key,
            "%s draws random numbers of the shape %s, and it could not be found out "
            "which dimension follows the rows of a batch. The first is taken for it if "
            "it is as long; several replicas may draw other numbers than one device.",
            dims,
        )
        guess = Follows(0)
        return guess if guess.fits(dims, rows) else None

    def here(self, rows: RowRange) -> "KnownDraws | None":
        """What knows of what is drawn now; None if that is to be a replica's own.

        Args:
            rows: The replica's rows.
        """
        return self

    def warn_of_shuffled_rows(self, seed: Any) -> None:
        """Says that rows are shuffled among each other."""
        self._warn(
            ("shuffle", seed),
            "%s shuffles the rows of a batch. Each of several replicas shuffles its "
            "own, where one device shuffles all of them.",
        )

    def _warn(self, key: Any, message: str, *args: Any) -> None:
        if key not in self._warned:
            self._warned.add(key)
            logger.warning(message, who_draws(), *args)


def _may_follow(dims: Dims, rows: int | None) -> bool:
    """Whether there is a dimension that may follow the rows."""
    if rows is None:
        return bool(dims)
    if rows == 0:
        return 0 in dims
    return any(size is None or size % rows == 0 for size in dims)


def _by_key(draws: Sequence[Drawn] | None) -> dict[Any, list[Drawn]]:
    found: dict[Any, list[Drawn]] = {}
    for drawn in draws or ():
        found.setdefault(drawn.key, []).append(drawn)
    return found


def _kinds(few: Sequence[Drawn], more: Sequence[Drawn]) -> list[Kind | None]:
    """What draws are, of which two rehearsals made these; None if that is unclear."""
    if len(few) != len(more):
        return [None]
    return [_kind(a.dims, b.dims, a.order) for a, b in zip(few, more, strict=True)]


def _kind(few: Dims, more: Dims, order: tuple[int, ...] | None) -> Kind | None:
    if len(few) != len(more):
        return None
    grown = [axis for axis in range(len(few)) if few[axis] != more[axis]]
    if not grown:
        return Fixed(few)
    if len(grown) > 1:
        return None
    (axis,) = grown
    small, large = few[axis], more[axis]
    if small is None or large is None or small % _ROWS[0]:
        return None
    per_row = small // _ROWS[0]
    follows = Follows(axis, per_row, order)
    return follows if large == per_row * _ROWS[1] else None


def key_of(name: str, seed: Any, rank: int) -> Any:
    """What draws of one kind have in common.

    Args:
        name: The function that draws.
        seed: Its seed. A generator is kept, so that no other one gets its `id`.
        rank: The number of dimensions.
    """
    own = seed if isinstance(seed, keras.random.SeedGenerator) else None
    return name, own, seed is None, rank


def who_draws() -> str:
    """The innermost layer or model that is being called, for a message."""
    frame = sys._getframe(1)
    while frame is not None:
        owner: Any = frame.f_locals.get("self")
        if isinstance(owner, keras.Layer):
            return f"The layer '{owner.name}'"
        frame = frame.f_back
    return "The step"


def whole(dims: Sequence[Any], follows: Follows, rows: RowRange) -> list[Any]:
    """The shape of the draw that one device makes.

    Args:
        dims: The shape of the replica's.
        follows: Which dimension follows the rows.
        rows: The replica's rows.
    """
    total = list(dims)
    total[follows.axis] = rows.total * follows.per_row
    return total


def own_part(numbers: Any, follows: Follows, rows: RowRange) -> Any:
    """What belongs to a replica's rows.

    Args:
        numbers: What one device draws.
        follows: Which dimension follows the rows.
        rows: The replica's rows.
    """
    begin = rows.begin * follows.per_row
    count = rows.count * follows.per_row
    if isinstance(count, int) and not isinstance(begin, int):
        # In one program of all replicas, or where a trace knows some numbers alone.
        start, shape = [0] * len(numbers.shape), list(keras.ops.shape(numbers))
        start[follows.axis], shape[follows.axis] = begin, count
        return keras.ops.slice(numbers, start, shape)
    end = begin + count
    return numbers[(slice(None),) * follows.axis + (slice(begin, end),)]


def of_all_rows(replica: Replica, x: Any, axis: int) -> Any:
    """A tensor with the rows of all replicas, where a dimension of it follows them."""
    weight = replica.step.row_weight
    if isinstance(weight, float) and weight == 0.0:
        # A replica without rows works on a stand-in, which is none of the batch's.
        x = x[(slice(None),) * axis + (slice(0, 0),)]
    elif weight is not None and not isinstance(weight, float):
        size = keras.ops.shape(x)[axis]
        count = keras.ops.where(weight > 0, size, 0)
        x = x[(slice(None),) * axis + (slice(0, count),)]
    return replica.all_gather(x, axis)
