"""A sum of the workers in pieces, the first of which leave before it is asked for.

When the pieces are due they are what travels next, on all workers and in one order. A
worker that comes to something else sends the rest of them empty, so that nobody waits
for what never comes, and by the tails all workers know that the sum counts for nothing.
The last piece says whether what left before is still what shall be added up, and so it
leaves when the sum is asked for.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from keras_strategy.core.workers import CHECKSUM_BYTES, CHECKSUM_TAIL, checksum_tail


class Work(Protocol):
    """A collective that was started."""

    def wait(self) -> Any:
        """Waits for it to end; raises what went wrong."""
        ...


@dataclass(frozen=True, eq=False)
class BucketPlan:
    """How a worker would send a sum in pieces.

    Attributes:
        sizes: The elements of each, in the order in which they leave; two or more.
        layout: What they are made of, in words that are the same on all workers which
            mean the same.
        of: Whose plan it is.
        taken: Called if all workers have the same plan.
        given_up: Called when it is followed no more.
    """

    sizes: Sequence[int]
    layout: str
    of: Any
    taken: Callable[["BucketedAllReduce"], None]
    given_up: Callable[[], None]

    def digest(self, part: int | None = None) -> bytes:
        """What tells it, or one of its pieces, from others; never all zeros."""
        text = f"{part}|{list(self.sizes)}|{self.layout}".encode()
        return hashlib.blake2b(text, digest_size=CHECKSUM_BYTES - 1).digest() + b"\1"


class BucketedAllReduce:
    """A sum that all workers have agreed to send in pieces.

    Args:
        digest: What tells the sum from others, when it travels in one piece.
        plan: How it travels.
        like: A tensor of its dtype, on its device.
        workers: How many there are.
        start: Starts to make a tensor the sum of the workers' tensors.

    Attributes:
        in_vain: How many times in a row it was.
    """

    def __init__(
        self,
        digest: bytes,
        plan: BucketPlan,
        like: torch.Tensor,
        workers: int,
        start: Callable[[torch.Tensor], Work],
    ):
        self.digest, self.plan, self.in_vain = digest, plan, 0
        self.room = sum(plan.sizes) + CHECKSUM_TAIL * len(plan.sizes)
        self._like = like.new_empty(0)
        self._start = start
        tails = [checksum_tail(plan.digest(part)) for part in range(len(plan.sizes))]
        self._said = [like.new_tensor(tail) for tail in tails]
        self._told = [workers * number for tail in tails for number in tail]
        self._pieces: tuple[torch.Tensor, ...] = ()
        self._works: list[Work] = []

    @property
    def sent(self) -> int:
        """How many pieces have left."""
        return len(self._works)

    @property
    def last(self) -> int:
        """The number of the last piece."""
        return len(self.plan.sizes) - 1

    def begin(self, memory: torch.Tensor) -> None:
        """Gives the memory that the pieces travel in, of `room` elements."""
        self._pieces = memory.split([size + CHECKSUM_TAIL for size in self.plan.sizes])

    def values(self, part: int) -> torch.Tensor:
        """A piece, without what travels behind it."""
        return self._pieces[part][:-CHECKSUM_TAIL]

    def send(self) -> None:
        """Sends the next piece, whose values are there."""
        piece = self._pieces[self.sent]
        piece[-CHECKSUM_TAIL:].copy_(self._said[self.sent])
        self._works.append(self._start(piece))

    def end(self) -> list[torch.Tensor] | None:
        """Sends what has not left yet empty, and waits for all of it.

        Returns:
            The pieces' sums; None if one of them was not what all workers add up.
        """
        if not self._pieces:
            self.begin(self._like.new_empty(self.room))
        try:
            for piece in self._pieces[self.sent :]:
                self._works.append(self._start(piece.zero_()))
            for work in self._works:
                work.wait()
            told = torch.cat([piece[-CHECKSUM_TAIL:] for piece in self._pieces]).tolist()
            sums = [piece[:-CHECKSUM_TAIL] for piece in self._pieces]
            return sums if told == self._told else None
        finally:
            self._pieces, self._works = (), []
