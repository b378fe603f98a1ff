"""Which part of its variables a replica keeps, where a strategy's `shard` splits them.

Where one program computes for all replicas, a variable is split along one dimension
into as many equal parts as there are replicas, of which each keeps one. If they divide
no dimension, the prime factors of their number may divide some, and there are fewer
parts. That follows from the shape alone, so that all workers split alike.

Where each replica updates what it keeps by itself, it keeps some of the elements, in
the order of the memory: a share.
"""

import contextlib
import logging
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from keras_strategy.rules.aggregation import is_on_read
from keras_strategy.values.logical_devices import prime_factors

logger = logging.getLogger("keras_strategy")

_SLOT, _SPLIT, _SHARES = "_ks_slot", "_ks_split", "_ks_shares"
# Of an optimizer, its `Division`.
DIVISION = "_ks_division"
_making = threading.local()


def dimension_to_split(shape: Sequence[int], replicas: int) -> int | None:
    """The largest dimension that the replicas divide, the first of equal ones.

    Args:
        shape: The variable's shape.
        replicas: The number of replicas, over all workers.

    Returns:
        None if there is no such dimension.
    """
    fitting = [i for i, size in enumerate(shape) if size and size % replicas == 0]
    return max(fitting, key=lambda i: (shape[i], -i), default=None)


@dataclass(frozen=True)
class Split:
    """Into which parts a variable is split.

    Attributes:
        replicas: The number of replicas, over all workers.
        dimension: The dimension that is split into as many parts; None if they divide
            none.
        by_factors: Then, for each prime factor of their number, the dimension that is
            split by it, or None. Other dimensions than one may be, and one by several.
    """

    replicas: int
    dimension: int | None
    by_factors: tuple[int | None, ...] = ()

    @classmethod
    def of_shape(
        cls, shape: Sequence[int], replicas: int, logical: Sequence[int] = ()
    ) -> "Split":
        """The most parts that there can be of a shape.

        Args:
            shape: The variable's shape.
            replicas: The number of replicas, over all workers.
            logical: Into how many parts the logical devices of each replica split each
                dimension: the replicas split these parts.
        """
        left, found = list(shape), []
        dimension = dimension_to_split(shape, replicas)
        if logical:
            left = [size // parts for size, parts in zip(shape, logical, strict=True)]
            if dimension is None or left[dimension] % replicas:
                dimension = dimension_to_split(left, replicas)
        if dimension is not None:
            return cls(replicas, dimension)
        for factor in prime_factors(replicas):
            fitting = dimension_to_split(left, factor)
            if fitting is not None:
                left[fitting] //= factor
            found.append(fitting)
        return cls(replicas, None, tuple(found))

    @property
    def parts(self) -> int:
        """The number of parts; 1 if the variable stays whole on each replica."""
        if self.dimension is not None:
            return self.replicas
        factors = prime_factors(self.replicas)
        pairs = zip(factors, self.by_factors, strict=True)
        return math.prod(factor for factor, dimension in pairs if dimension is not None)


@contextlib.contextmanager
def making_slots(layout: Any = None) -> Iterator[None]:
    """Surrounds what makes variables of an optimizer.

    Args:
        layout: That of the weight which they belong to, if it is known.
    """
    before = is_making_slots(), layout_of_weight()
    _making.slots, _making.layout = True, layout
    try:
        yield
    finally:
        _making.slots, _making.layout = before


def is_making_slots() -> bool:
    """Whether this thread is making variables of an optimizer."""
    return getattr(_making, "slots", False)


def layout_of_weight() -> Any:
    """The layout of the weight of which variables of an optimizer are being made."""
    return getattr(_making, "layout", None)


def note_slot(variable: Any) -> None:
    """Notes that a variable is an optimizer's, which may get its value later."""
    vars(variable)[_SLOT] = True


def note_split(variable: Any, split: Split | None) -> None:
    """Notes how a variable is split; None if it is whole."""
    if split is not None and split.dimension is None and split.parts == 1:
        split = None
    vars(variable)[_SPLIT] = split


def split_of(variable: Any) -> Split | None:
    """How a variable is split; None if it is whole."""
    return vars(variable).get(_SPLIT)


def is_split(variable: Any) -> bool:
    """Whether each replica keeps a part of a variable alone."""
    return split_of(variable) is not None or _SHARES in vars(variable)


@dataclass(frozen=True)
class Shares:
    """Which elements of a variable each replica keeps.

    Attributes:
        shape: The variable's shape.
        bounds: For each replica, where its elements begin and end.
    """

    shape: tuple[int, ...]
    bounds: tuple[tuple[int, int], ...]

    @classmethod
    def even(cls, shape: Sequence[int], replicas: int) -> "Shares":
        """As many elements for each replica, as far as they go."""
        ends = [math.prod(shape) * r // replicas for r in range(replicas + 1)]
        return cls(tuple(shape), tuple(zip(ends, ends[1:], strict=False)))

    @classmethod
    def of_one(cls, shape: Sequence[int], replicas: int, owner: int) -> "Shares":
        """All elements for one replica."""
        size = math.prod(shape)
        bounds = [(0, 0)] * owner + [(0, size)] + [(size, size)] * replicas
        return cls(tuple(shape), tuple(bounds[:replicas]))

    def size_of(self, replica: int) -> int:
        """How many elements a replica keeps."""
        begin, end = self.bounds[replica]
        return end - begin

    def shape_of(self, replica: int) -> tuple[int, ...]:
        """The shape of what a replica keeps: the variable's, or one dimension."""
        size = self.size_of(replica)
        return self.shape if size == math.prod(self.shape) else (size,)


def note_shares(variable: Any, shares: Shares) -> None:
    """Notes which elements of a variable each replica keeps."""
    vars(variable)[_SHARES] = shares


def shares_of(variable: Any) -> Shares | None:
    """Which elements of a variable each replica keeps; None if it is not shared."""
    return vars(variable).get(_SHARES)


class Division:
    """How the replicas share what an optimizer keeps.

    Args:
        replicas: Their number, over all workers.
        elementwise: Whether the optimizer updates an element of a weight by what it
            keeps of that element. Otherwise each weight has one replica that updates
            it, and keeps all that belongs to it.

    Attributes:
        slots: The variables that they share.
    """

    def __init__(self, replicas: int, elementwise: bool):
        self.elementwise = elementwise
        self.slots: list[Any] = []
        self._loads = [0] * replicas
        self._owners: dict[int, tuple[Any, int]] = {}

    def shares(self, weight: Any, shape: Sequence[int]) -> Shares:
        """The shares of a weight, or of what is kept of it.

        All workers ask for weights in one order, so that they find the same.

        Args:
            weight: The weight.
            shape: The shape of what is shared.
        """
        replicas = len(self._loads)
        if self.elementwise:
            return Shares.even(shape, replicas)
        if id(weight) not in self._owners:
            owner = min(range(replicas), key=self._loads.__getitem__)
            self._loads[owner] += math.prod(weight.shape)
            self._owners[id(weight)] = weight, owner
        return Shares.of_one(shape, replicas, self._owners[id(weight)][1])

    def given_to(self, replica: int, weights: Sequence[Any]) -> list[int]:
        """The numbers of the weights of whose gradients a replica is given its share.

        Elementwise rules take nothing, too, and all replicas count steps with it.

        Args:
            replica: The replica's number.
            weights: The weights that have gradients.
        """
        return [
            number
            for number, weight in enumerate(weights)
            if self.elementwise or self.shares(weight, weight.shape).size_of(replica)
        ]


def shares_of_gradients(
    optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any] | None
) -> list[Shares] | None:
    """Of which elements of gradients each replica needs the sum.

    Args:
        optimizer: What they are given to, which the replicas share.
        gradients: The gradients.
        variables: Their variables; None where they are not known.

    Returns:
        None if replicas need others, too.
    """
    if variables is None or len(variables) != len(gradients):
        return None  # it is no optimizer's sum, or of unknown variables
    if optimizer.loss_scale_factor is not None:
        return None
    division: Division = vars(optimizer)[DIVISION]
    for gradient, variable in zip(gradients, variables, strict=True):
        same = tuple(gradient.shape) == tuple(variable.shape)
        if variable.overwrite_with_gradient or not same:
            return None
    return [division.shares(variable, variable.shape) for variable in variables]


class Splitting:
    """What a strategy splits, and how.

    Args:
        shard: The strategy's argument.
        replicas: The number of replicas, over all workers.
    """

    def __init__(self, shard: str | None, replicas: int):
        self.shard, self.replicas = shard, replicas
        self._told: set[bool] = set()

    def of(self, variable: Any, logical: Sequence[int] = ()) -> Split | None:
        """How a variable that is made now is to be split; None if it is to be whole.

        Args:
            variable: The variable, whose shape is known.
            logical: See `Split.of_shape`.
        """
        if self.shard is None or is_on_read(variable):
            return None
        slot = is_making_slots() or _SLOT in vars(variable)
        if not slot and not (variable.trainable and self.shard == "parameters"):
            return None
        shape = tuple(variable.shape)
        split = Split.of_shape(shape, self.replicas, logical)
        whole = split.parts == 1
        if split.dimension is None and shape and whole not in self._told:
            self._told.add(whole)
            logger.info(
                "shard='%s': %d replicas divide no dimension of a variable of the "
                "shape %s, which %s. `strategy.memory_report(model)` lists all such "
                "variables.",
                self.shard,
                self.replicas,
                shape,
                "stays whole on each of them"
                if whole
                else f"is split into {split.parts} parts",
            )
        return split
