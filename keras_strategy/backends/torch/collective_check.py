"""A sum of the workers in pieces, the first of which leave before it is asked for.

When the pieces are due they are what travels next, on all workers and in one order. A
worker that comes to something else sends the rest of them empty, so that nobody waits
for what never comes, and by the tails all workers know that the sum counts for nothing.
The last piece says whether what left before is still what shall be added up, and so it
leaves when the sum is asked for.

Workers compare what they are about to send, in the collective that sends it.

torch hangs or ends the process where the values of a collective have other sizes on
other workers. So what travels first has a size that follows from what all workers did
before, and tells what each is about to do.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from keras_strategy.core.collectives import (
    CHECKSUM_BYTES,
    CHECKSUM_TAIL,
    MAX_CHECKSUM_WORKERS,
    checksum_tail,
)


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
            told = torch.cat(
                [piece[-CHECKSUM_TAIL:] for piece in self._pieces]
            ).tolist()
            sums = [piece[:-CHECKSUM_TAIL] for piece in self._pieces]
            return sums if told == self._told else None
        finally:
            self._pieces, self._works = (), []


# In these the sums of what travels behind the values are exact.
_EXACT = (torch.float32, torch.float64, torch.int32, torch.int64)
# Of these a sum may travel in pieces. The workers ask each other for a plan when it has
# come for the second time, and seldom later: another model may have one.
_IN_PIECES = (torch.float32, torch.float64)
_TIMES_TO_ASK, _ALWAYS_TO_ASK = (2, 16), 128
# Two in a row are in vain where one `fit` ends and another begins.
_MOST_IN_VAIN = 3
# A larger sum takes longer than to compare before, and costs more if it is in vain.
_LARGEST_BYTES = 16 << 20
_MOST_REMEMBERED = 1024


@dataclass(frozen=True)
class _Sum:
    """A sum that all workers made.

    Attributes:
        digest: What it was.
        size: The number of elements.
        dtype: Theirs.
        device: Where they were.
        said: The digest, as each worker sends it.
        told: What the workers' digests add up to.
    """

    digest: bytes
    size: int
    dtype: torch.dtype
    device: torch.device
    said: torch.Tensor
    told: list[int]


class CollectiveVerifier:
    """Sums tensors that all workers say to be the same operation's.

    Programs repeat themselves: the sum that came after an operation is expected to come
    after it again. Then its values travel at once, with the digest behind them. A
    worker that is about to do something else sends zeros in their place, so that the
    sizes agree, and by the digests all workers notice. Where nothing is expected, the
    digests travel alone.

    What is expected follows from operations that all workers took part in, so it is
    the same on all of them. That goes for a sum in pieces too: it is expected where it
    came before, and all workers send its pieces, whatever they are about to do.

    Args:
        workers: How many there are.
        all_reduce: Combines a tensor of the same size on all workers, in place.
        start: Starts to sum a tensor of the same size on all workers, in place.
        least: From how many bytes on a sum may travel in pieces, with the room behind
            it; the same number on all workers, None for never.

    Attributes:
        due: The sum in pieces that travels next on all workers, if there is one. After
            it was in vain it is not due until something else has come.
    """

    def __init__(
        self,
        workers: int,
        all_reduce: Callable[[torch.Tensor, dist.ReduceOp.RedOpType], object],
        start: Callable[[torch.Tensor], Work] | None = None,
        least: int | None = None,
    ):
        self._workers = workers
        self._all_reduce = all_reduce
        self._start, self._least = start, least
        self.due: BucketedAllReduce | None = None
        self._in_pieces: dict[bytes, BucketedAllReduce] = {}  # by what comes before
        self._came: dict[tuple[bytes, bytes], int] = {}
        self._last = b""
        self._expected: dict[bytes, _Sum] = {}  # by what came before
        # Where something else came the last time, as the logs at an epoch's end.
        self._doubted: set[bytes] = set()

    def compare(self, digest: bytes, device: torch.device) -> bool:
        """Whether all workers are about to do the same.

        Args:
            digest: What this worker is about to do, see `call_checksum`.
            device: Where its values are.
        """
        if self.due is not None:
            self.end_pieces()  # it is another sum than this
        expected = self._expected.get(self._last)
        if expected is None:
            same = self._all_say(int.from_bytes(digest), device)
        else:
            # It is another digest than what was expected.
            nothing = torch.zeros(
                expected.size + CHECKSUM_TAIL,
                dtype=expected.dtype,
                device=expected.device,
            )
            same = self._sum_and_compare(nothing, self._saying(digest, nothing))
        if same:
            self._doubt()
            self._last, self.due = digest, self._in_pieces.get(digest)
        return same

    def _all_say(self, number: int, device: torch.device) -> bool:
        # The largest of n and of -n are each other's negative if all n are equal.
        both = torch.tensor([number, -number], device=device)
        self._all_reduce(both, dist.ReduceOp.MAX)
        return int(both[0]) == -int(both[1])

    def end_pieces(self) -> list[torch.Tensor] | None:
        """Brings the sum that is due to its end, of which all pieces may have left.

        Returns:
            The sums of the pieces. None if they are in vain, on all workers, and the
            sum is to travel in one piece.
        """
        pieces, before = self._in_pieces[self._last], self._last
        sums = pieces.end()
        if sums is not None:
            pieces.in_vain = 0
            self._last = pieces.digest
            self.due = self._in_pieces.get(self._last)
            return sums
        self.due = None
        pieces.in_vain += 1
        if pieces.in_vain == _MOST_IN_VAIN:
            del self._in_pieces[before]
            pieces.plan.given_up()
        return None

    def _ask(
        self,
        before: bytes,
        digest: bytes,
        values: torch.Tensor,
        plan: Callable[[], BucketPlan | None] | None,
    ) -> None:
        """Asks all workers whether they would send a sum in pieces from now on.

        All of them ask, also one that has no plan, and the workers' plans are compared.
        """
        if (
            self._start is None
            or values.dtype not in _IN_PIECES
            or self._workers > MAX_CHECKSUM_WORKERS
            or before in self._in_pieces
            or len(self._in_pieces) >= _MOST_REMEMBERED
        ):
            return
        if len(self._came) >= _MOST_REMEMBERED:
            self._came.clear()
        times = self._came[before, digest] = self._came.get((before, digest), 0) + 1
        if times not in _TIMES_TO_ASK and times % _ALWAYS_TO_ASK:
            return
        mine = plan() if plan is not None else None
        number = 0 if mine is None else int.from_bytes(mine.digest())
        if not self._all_say(number, values.device) or mine is None:
            return
        self._expected.pop(before, None)
        self._doubted.discard(before)
        self._in_pieces[before] = pieces = BucketedAllReduce(
            digest, mine, values, self._workers, self._start
        )
        self.due = self._in_pieces.get(self._last)
        mine.taken(pieces)

    def _doubt(self) -> None:
        """What is expected has not come; the second time in a row it is forgotten."""
        if self._last not in self._expected:
            return
        if self._last in self._doubted:
            del self._expected[self._last]
            self._doubted.remove(self._last)
        else:
            self._doubted.add(self._last)

    def sum(self, digest: bytes, flat: torch.Tensor) -> torch.Tensor | None:
        """The sum of the workers' tensors.

        Args:
            digest: What this worker adds up, its size and dtype included.
            flat: A tensor of one dimension.

        Returns:
            A new tensor; None if the workers are about to do different things.
        """
        both = flat.new_empty(flat.numel() + CHECKSUM_TAIL)
        both[:-CHECKSUM_TAIL].copy_(flat)
        return both[:-CHECKSUM_TAIL] if self.sum_in_place(digest, both) else None

    def sum_in_place(
        self,
        digest: bytes,
        both: torch.Tensor,
        plan: Callable[[], BucketPlan | None] | None = None,
    ) -> bool:
        """Makes a tensor the sum of the workers' tensors.

        Args:
            digest: What this worker adds up, its size and dtype included.
            both: A tensor of one dimension, of which the last `CHECKSUM_TAIL` elements are room
                for what travels behind the values.
            plan: Gives how this worker would send it in pieces, None if it would not.

        Returns:
            Whether all workers add up the same.
        """
        if self.due is not None:
            self.end_pieces()
        before = self._last
        expected = self._expected.get(before)
        if expected is not None and expected.digest == digest:
            same = self._sum_and_compare(both, expected)
            if same:
                self._doubted.discard(before)
                self._last, self.due = digest, self._in_pieces.get(digest)
        else:
            same = self._compare_and_sum(digest, both)
        if same and self._least is not None and both.nbytes >= self._least:
            self._ask(before, digest, both, plan)
        return same

    def _compare_and_sum(self, digest: bytes, both: torch.Tensor) -> bool:
        before = self._last
        if not self.compare(digest, both.device):
            return False
        values = both[:-CHECKSUM_TAIL]
        self._all_reduce(values, dist.ReduceOp.SUM)
        if (
            before not in self._expected
            and before not in self._in_pieces
            and values.dtype in _EXACT
            and self._workers <= MAX_CHECKSUM_WORKERS
            and values.nbytes <= _LARGEST_BYTES
        ):
            if len(self._expected) >= _MOST_REMEMBERED:
                self._expected.clear()
                self._doubted.clear()
            self._expected[before] = self._saying(digest, both)
        return True

    def _saying(self, digest: bytes, both: torch.Tensor) -> _Sum:
        said = checksum_tail(digest)
        return _Sum(
            digest,
            both.numel() - CHECKSUM_TAIL,
            both.dtype,
            both.device,
            both.new_tensor(said),
            [self._workers * number for number in said],
        )

    def _sum_and_compare(self, both: torch.Tensor, sum_: _Sum) -> bool:
        tail = both[-CHECKSUM_TAIL:]
        tail.copy_(sum_.said)
        self._all_reduce(both, dist.ReduceOp.SUM)
        return tail.tolist() == sum_.told
