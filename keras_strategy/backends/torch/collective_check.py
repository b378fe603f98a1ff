"""Collectives that first verify that all workers are about to run the same one.

torch hangs, or aborts the process, when workers start collectives of different sizes.
Programs repeat themselves, so the sum that followed an operation is expected to follow
it again. Its values are then sent at once, with a checksum behind them. A worker that
reaches another operation sends zeros of the expected size instead: the sizes agree, and
the checksums tell every worker to discard the result. When no sum is expected, the
checksums are compared first, in a collective of their own.

A large sum that repeats may be split into buckets, which are sent in a fixed order
while other values are still being computed. A worker that reaches a different
operation sends zeros for the remaining buckets, so no worker hangs, and the checksum
behind each bucket tells every worker to discard the result. The last bucket is sent
when the sum is requested, and so confirms what was sent before.

What is expected follows only from operations in which all workers took part, so it is
the same on all of them.
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

# Checksums are summed exactly in these dtypes.
_EXACT_DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)
_BUCKET_DTYPES = (torch.float32, torch.float64)
# How often a sum must have come before the workers compare bucket plans. They do so
# again later, since another model may have a plan.
_COMPARE_PLANS_AT, _COMPARE_PLANS_EVERY = (2, 16), 128
# Two in a row are discarded where one `fit` ends and another begins.
_MAX_DISCARDED_IN_A_ROW = 3
# A larger sum takes longer than a comparison, and costs more if it is discarded.
_MAX_EXPECTED_BYTES = 16 << 20
_MAX_REMEMBERED = 1024


class Work(Protocol):
    """A collective that was started."""

    def wait(self) -> Any:
        """Wait for its end, and raise its error."""
        ...


class BucketPlan:
    """Split of a sum into buckets.

    Args:
        sizes: The number of elements of each bucket, in sending order; two or more.
        layout: A description of the contents, equal on workers with equal plans.
    """

    def __init__(self, sizes: Sequence[int], layout: str):
        self.sizes, self.layout = list(sizes), layout

    def checksum(self, bucket: int | None = None) -> bytes:
        """Return bytes that identify the plan or one bucket; never all zeros."""
        text = f"{bucket}|{self.sizes}|{self.layout}".encode()
        return hashlib.blake2b(text, digest_size=CHECKSUM_BYTES - 1).digest() + b"\1"

    def on_agreed(self, all_reduce: "BucketedAllReduce") -> None:
        """Start to use the plan, which all workers have."""

    def on_dropped(self) -> None:
        """Stop to use the plan."""


class BucketedAllReduce:
    """An all-reduce in buckets, with a plan that all workers have.

    Args:
        checksum: The checksum of the sum as one collective.
        plan: The buckets.
        like: A tensor of its dtype, on its device.
        workers: The number of workers.
        start: Starts to sum a tensor over the workers, in place.

    Attributes:
        discarded: How many times in a row the result was discarded.
    """

    def __init__(
        self,
        checksum: bytes,
        plan: BucketPlan,
        like: torch.Tensor,
        workers: int,
        start: Callable[[torch.Tensor], Work],
    ):
        self.checksum, self.plan, self.discarded = checksum, plan, 0
        self.buffer_size = sum(plan.sizes) + CHECKSUM_TAIL * len(plan.sizes)
        self._like = like.new_empty(0)
        self._start = start
        tails = [checksum_tail(plan.checksum(i)) for i in range(len(plan.sizes))]
        self._tails = [like.new_tensor(tail) for tail in tails]
        self._tail_sums = [workers * number for tail in tails for number in tail]
        self._buckets: tuple[torch.Tensor, ...] = ()
        self._works: list[Work] = []

    @property
    def sent(self) -> int:
        """The number of buckets that were sent."""
        return len(self._works)

    @property
    def last(self) -> int:
        """The index of the last bucket."""
        return len(self.plan.sizes) - 1

    def begin(self, buffer: torch.Tensor) -> None:
        """Set the memory of the buckets, of `buffer_size` elements."""
        sizes = [size + CHECKSUM_TAIL for size in self.plan.sizes]
        self._buckets = buffer.split(sizes)

    def values(self, bucket: int) -> torch.Tensor:
        """Return a bucket without its checksum."""
        return self._buckets[bucket][:-CHECKSUM_TAIL]

    def send(self) -> None:
        """Send the next bucket, whose values were written."""
        bucket = self._buckets[self.sent]
        bucket[-CHECKSUM_TAIL:].copy_(self._tails[self.sent])
        self._works.append(self._start(bucket))

    def end(self) -> list[torch.Tensor] | None:
        """Send zeros for the remaining buckets, and wait for all of them.

        Returns:
            The sums; None on all workers if one of them did not send all buckets.
        """
        if not self._buckets:
            self.begin(self._like.new_empty(self.buffer_size))
        try:
            for bucket in self._buckets[self.sent :]:
                self._works.append(self._start(bucket.zero_()))
            for work in self._works:
                work.wait()
            tails = torch.cat([b[-CHECKSUM_TAIL:] for b in self._buckets]).tolist()
            sums = [bucket[:-CHECKSUM_TAIL] for bucket in self._buckets]
            return sums if tails == self._tail_sums else None
        finally:
            self._buckets, self._works = (), []


@dataclass(frozen=True)
class _ExpectedSum:
    """A sum that all workers made.

    Attributes:
        tail: The checksum that each worker sends behind the values.
        tail_sum: The sum of all workers' checksums if they are equal.
    """

    checksum: bytes
    size: int
    dtype: torch.dtype
    device: torch.device
    tail: torch.Tensor
    tail_sum: list[int]


class CollectiveVerifier:
    """Sums of tensors that detect workers in different operations.

    Args:
        workers: The number of workers.
        all_reduce: Reduces a tensor of the same size on all workers, in place.
        start: Starts to sum a tensor of the same size on all workers, in place.
        min_bucketed_bytes: Smallest buffer that may be sent in buckets; the same on all
            workers, None for never.

    Attributes:
        pending: The bucketed sum that all workers send next, or None. After it was
            discarded it is not pending until another operation has come.
    """

    def __init__(
        self,
        workers: int,
        all_reduce: Callable[[torch.Tensor, dist.ReduceOp.RedOpType], object],
        start: Callable[[torch.Tensor], Work] | None = None,
        min_bucketed_bytes: int | None = None,
    ):
        self._workers = workers
        self._all_reduce = all_reduce
        self._start, self._min_bucketed_bytes = start, min_bucketed_bytes
        self.pending: BucketedAllReduce | None = None
        self._previous = b""  # the checksum of the last operation
        # By the checksum of the operation before.
        self._bucketed: dict[bytes, BucketedAllReduce] = {}
        self._expected: dict[bytes, _ExpectedSum] = {}
        # After these another operation came last time, such as an epoch's logs.
        self._missed: set[bytes] = set()
        self._occurrences: dict[tuple[bytes, bytes], int] = {}

    def verify(self, checksum: bytes, device: torch.device) -> bool:
        """Return True if all workers are about to run the same operation."""
        if self.pending is not None:
            self.finish_pending()
        previous = self._previous
        expected = self._expected.get(previous)
        if expected is None:
            same = self._all_equal(int.from_bytes(checksum), device)
        else:
            zeros = torch.zeros(
                expected.size + CHECKSUM_TAIL,
                dtype=expected.dtype,
                device=expected.device,
            )
            same = self._sum_and_check(zeros, self._expect(checksum, zeros))
            if same and previous in self._missed:  # the second time in a row
                del self._expected[previous]
                self._missed.remove(previous)
            elif same:
                self._missed.add(previous)
        if same:
            self._previous = checksum
            self.pending = self._bucketed.get(self._previous)
        return same

    def sum(self, checksum: bytes, flat: torch.Tensor) -> torch.Tensor | None:
        """Sum a flat tensor over the workers.

        Args:
            checksum: Identifies the operation, size and dtype, see `call_checksum`.
            flat: A tensor of one dimension.

        Returns:
            A new tensor; None if the workers are about to run different operations.
        """
        buffer = flat.new_empty(flat.numel() + CHECKSUM_TAIL)
        values = buffer[:-CHECKSUM_TAIL].copy_(flat)
        return values if self.sum_in_place(checksum, buffer) else None

    def sum_in_place(
        self,
        checksum: bytes,
        buffer: torch.Tensor,
        plan: Callable[[], BucketPlan | None] | None = None,
    ) -> bool:
        """Sum a buffer over the workers, in place.

        Args:
            checksum: See `sum`.
            buffer: A tensor of one dimension, whose last `CHECKSUM_TAIL` elements are
                free.
            plan: Returns this worker's bucket plan for it, or None.

        Returns:
            False if the workers are about to run different operations.
        """
        if self.pending is not None:
            self.finish_pending()
        previous = self._previous
        expected = self._expected.get(previous)
        if expected is not None and expected.checksum == checksum:
            same = self._sum_and_check(buffer, expected)
            if same:
                self._missed.discard(previous)
                self._previous = checksum
                self.pending = self._bucketed.get(self._previous)
        else:
            same = self.verify(checksum, buffer.device)
            if same:
                self._all_reduce(buffer[:-CHECKSUM_TAIL], dist.ReduceOp.SUM)
                self._expect_after(previous, checksum, buffer)
        least = self._min_bucketed_bytes
        if same and least is not None and buffer.nbytes >= least:
            self._compare_plans(previous, checksum, buffer, plan)
        return same

    def finish_pending(self) -> list[torch.Tensor] | None:
        """Finish the pending sum.

        Returns:
            The sums of its buckets. None on all workers if it was discarded; the sum
            is then sent as one collective.
        """
        previous = self._previous
        bucketed = self._bucketed[previous]
        sums = bucketed.end()
        if sums is not None:
            bucketed.discarded = 0
            self._previous = bucketed.checksum
            self.pending = self._bucketed.get(self._previous)
            return sums
        self.pending = None
        bucketed.discarded += 1
        if bucketed.discarded == _MAX_DISCARDED_IN_A_ROW:
            del self._bucketed[previous]
            bucketed.plan.on_dropped()
        return None

    def _all_equal(self, number: int, device: torch.device) -> bool:
        # The maxima of n and of -n are each other's negative if all n are equal.
        maxima = torch.tensor([number, -number], device=device)
        self._all_reduce(maxima, dist.ReduceOp.MAX)
        return int(maxima[0]) == -int(maxima[1])

    def _compare_plans(
        self,
        previous: bytes,
        checksum: bytes,
        values: torch.Tensor,
        plan: Callable[[], BucketPlan | None] | None,
    ) -> None:
        """Send a sum in buckets from now on, if all workers have the same plan.

        Workers without a plan take part, too.
        """
        if (
            self._start is None
            or values.dtype not in _BUCKET_DTYPES
            or self._workers > MAX_CHECKSUM_WORKERS
            or previous in self._bucketed
            or len(self._bucketed) >= _MAX_REMEMBERED
        ):
            return
        if len(self._occurrences) >= _MAX_REMEMBERED:
            self._occurrences.clear()
        key = previous, checksum
        times = self._occurrences[key] = self._occurrences.get(key, 0) + 1
        if times not in _COMPARE_PLANS_AT and times % _COMPARE_PLANS_EVERY:
            return
        local = plan() if plan is not None else None
        number = 0 if local is None else int.from_bytes(local.checksum())
        if not self._all_equal(number, values.device) or local is None:
            return
        self._expected.pop(previous, None)
        self._missed.discard(previous)
        bucketed = BucketedAllReduce(
            checksum, local, values, self._workers, self._start
        )
        self._bucketed[previous] = bucketed
        self.pending = self._bucketed.get(self._previous)
        local.on_agreed(bucketed)

    def _expect_after(
        self, previous: bytes, checksum: bytes, buffer: torch.Tensor
    ) -> None:
        if (
            previous in self._expected
            or previous in self._bucketed
            or buffer.dtype not in _EXACT_DTYPES
            or self._workers > MAX_CHECKSUM_WORKERS
            or buffer[:-CHECKSUM_TAIL].nbytes > _MAX_EXPECTED_BYTES
        ):
            return
        if len(self._expected) >= _MAX_REMEMBERED:
            self._expected.clear()
            self._missed.clear()
        self._expected[previous] = self._expect(checksum, buffer)

    def _expect(self, checksum: bytes, buffer: torch.Tensor) -> _ExpectedSum:
        tail = checksum_tail(checksum)
        return _ExpectedSum(
            checksum,
            buffer.numel() - CHECKSUM_TAIL,
            buffer.dtype,
            buffer.device,
            buffer.new_tensor(tail),
            [self._workers * number for number in tail],
        )

    def _sum_and_check(self, buffer: torch.Tensor, expected: _ExpectedSum) -> bool:
        tail = buffer[-CHECKSUM_TAIL:]
        tail.copy_(expected.tail)
        self._all_reduce(buffer, dist.ReduceOp.SUM)
        return tail.tolist() == expected.tail_sum
