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
import math
from collections.abc import Callable, Sequence
from typing import Any

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
# How often a sum must have come before the workers compare their buckets. They do so
# again later, since another model may have buckets.
_COMPARE_AT, _COMPARE_EVERY = (2, 16), 128
# Two in a row are discarded where one `fit` ends and another begins.
_MAX_DISCARDED_IN_A_ROW = 3
# A larger sum takes longer than a comparison, and costs more if it is discarded.
_MAX_EXPECTED_BYTES = 16 << 20
_MAX_REMEMBERED = 1024


def scale_in_place(values: torch.Tensor, weight: float | None) -> None:
    """Multiply by a row weight; 0 selects zeros, so that a NaN cannot leak."""
    if weight == 0:
        values.zero_()
    elif weight is not None:
        values.mul_(weight)


class BucketedAllReduce:
    """A sum that is sent in buckets when all workers have agreed to it.

    `sizes` are the numbers of elements of two or more buckets, in sending order. The
    text `layout` describes the contents and is equal on workers with equal buckets.
    """

    def __init__(self, sizes: Sequence[int], layout: str):
        self.sizes, self._layout = list(sizes), layout
        self.buffer_size = sum(sizes) + CHECKSUM_TAIL * len(sizes)
        self.sent = 0  # how many buckets of the current sum were sent
        self.discarded = 0  # how many times in a row the result was discarded
        self._buckets: tuple[torch.Tensor, ...] = ()
        self._works: list[Any] = []

    def layout_checksum(self, bucket: int | None = None) -> bytes:
        """Return bytes that identify all buckets or one of them; never all zeros."""
        text = f"{bucket}|{self.sizes}|{self._layout}".encode()
        return hashlib.blake2b(text, digest_size=CHECKSUM_BYTES - 1).digest() + b"\1"

    def agree(self, verifier: Any, checksum: bytes, like: torch.Tensor) -> None:
        """Start using the buckets, given the checksum of the sum as one collective."""
        self.checksum = checksum
        self._all_reduce, workers = verifier.all_reduce, verifier.workers
        tails = [checksum_tail(self.layout_checksum(i)) for i in range(len(self.sizes))]
        self._tails = [like.new_tensor(tail) for tail in tails]
        self._tail_sums = [workers * number for tail in tails for number in tail]

    def drop(self) -> None:
        """Stop using the buckets."""

    def begin(self, buffer: torch.Tensor) -> None:
        """Set the memory of the buckets, of `buffer_size` elements."""
        self._buckets = buffer.split([size + CHECKSUM_TAIL for size in self.sizes])

    def send(self, tensors: Sequence[torch.Tensor], weight: float | None) -> None:
        """Send the next bucket: weighted tensors, and a checksum."""
        bucket = self._buckets[self.sent]
        values = bucket[:-CHECKSUM_TAIL]
        torch.cat([tensor.reshape(-1) for tensor in tensors], out=values)
        scale_in_place(values, weight)
        bucket[-CHECKSUM_TAIL:].copy_(self._tails[self.sent])
        self._works.append(self._all_reduce(bucket, async_op=True))
        self.sent += 1

    def end(self) -> list[torch.Tensor] | None:
        """Send zeros for the remaining buckets, and return the sums of all of them.

        Return None on all workers if one of them did not send all buckets.
        """
        if not self._buckets:
            self.begin(self._tails[0].new_empty(self.buffer_size))
        try:
            for bucket in self._buckets[self.sent :]:
                self._works.append(self._all_reduce(bucket.zero_(), async_op=True))
            for work in self._works:
                work.wait()
            tails = torch.cat([b[-CHECKSUM_TAIL:] for b in self._buckets]).tolist()
            sums = [bucket[:-CHECKSUM_TAIL] for bucket in self._buckets]
            return sums if tails == self._tail_sums else None
        finally:
            self._buckets, self._works, self.sent = (), [], 0


class _ExpectedSum:
    """A sum that all workers made."""

    def __init__(self, checksum: bytes, buffer: torch.Tensor, workers: int):
        tail = checksum_tail(checksum)
        self.checksum, self.size = checksum, buffer.numel()
        self.tail = buffer.new_tensor(tail)  # what each worker sends behind the values
        self.tail_sum = [workers * number for number in tail]
        # True if another operation came last time, such as an epoch's logs.
        self.was_missed = False


class CollectiveVerifier:
    """Sums of tensors that detect workers in different operations.

    A buffer of `min_bucketed_bytes`, equal on all workers, may be sent in buckets.
    """

    def __init__(
        self,
        workers: int,
        # In place, as `torch.distributed.all_reduce`.
        all_reduce: Callable[..., Any],
        min_bucketed_bytes: float = math.inf,
    ):
        self.workers, self.all_reduce = workers, all_reduce
        self._min_bucketed_bytes = min_bucketed_bytes
        # The bucketed sum that all workers send next. After it was discarded it is not
        # pending until another operation has come.
        self.pending: BucketedAllReduce | None = None
        self._previous = b""  # the checksum of the last operation
        # By the checksum of the operation before.
        self._bucketed: dict[bytes, BucketedAllReduce] = {}
        self._expected: dict[bytes, _ExpectedSum] = {}
        self._occurrences: dict[tuple[bytes, bytes], int] = {}

    def verify(self, checksum: bytes, device: torch.device) -> bool:
        """Return True if all workers are about to run the same operation."""
        if self.pending is not None:
            self.finish_pending()
        expected = self._expected.get(self._previous)
        if expected is None:
            same = self._all_equal(int.from_bytes(checksum), device)
        else:
            zeros = expected.tail.new_zeros(expected.size)
            sent = _ExpectedSum(checksum, zeros, self.workers)
            same = self._sum_and_check(zeros, sent)
            if same and expected.was_missed:  # the second time in a row
                del self._expected[self._previous]
            elif same:
                expected.was_missed = True
        if same:
            self._previous = checksum
            self.pending = self._bucketed.get(checksum)
        return same

    def sum_in_place(
        self,
        checksum: bytes,
        buffer: torch.Tensor,
        split: Callable[[], BucketedAllReduce | None] = lambda: None,
    ) -> bool:
        """Sum a flat buffer, whose last `CHECKSUM_TAIL` elements are free, in place.

        Return False if the workers are about to run different operations. `split`
        returns the buckets that this worker would send.
        """
        if self.pending is not None:
            self.finish_pending()
        previous = self._previous
        expected = self._expected.get(previous)
        if expected is not None and expected.checksum == checksum:
            same = self._sum_and_check(buffer, expected)
            if same:
                expected.was_missed = False
                self._previous = checksum
                self.pending = self._bucketed.get(checksum)
        else:
            same = self.verify(checksum, buffer.device)
            if same:
                self.all_reduce(buffer[:-CHECKSUM_TAIL], dist.ReduceOp.SUM)
                self._expect_after(previous, checksum, buffer)
        if same and buffer.nbytes >= self._min_bucketed_bytes:
            self._compare_buckets(previous, checksum, buffer, split)
        return same

    def finish_pending(self) -> list[torch.Tensor] | None:
        """Finish the pending sum, and return its buckets, or None if it is discarded.

        All workers discard it, and it is then sent as one collective.
        """
        bucketed = self._bucketed[self._previous]
        sums = bucketed.end()
        if sums is not None:
            bucketed.discarded = 0
            self._previous = bucketed.checksum
            self.pending = self._bucketed.get(bucketed.checksum)
            return sums
        self.pending = None
        bucketed.discarded += 1
        if bucketed.discarded == _MAX_DISCARDED_IN_A_ROW:
            self._bucketed.pop(self._previous).drop()
        return None

    def _all_equal(self, number: int, device: torch.device) -> bool:
        # The maxima of n and of -n are each other's negative if all n are equal.
        maxima = torch.tensor([number, -number], device=device)
        self.all_reduce(maxima, dist.ReduceOp.MAX)
        return int(maxima[0]) == -int(maxima[1])

    def _compare_buckets(
        self,
        previous: bytes,
        checksum: bytes,
        values: torch.Tensor,
        split: Callable[[], BucketedAllReduce | None],
    ) -> None:
        """Send a sum in buckets from now on, if all workers have the same ones."""
        if (
            values.dtype not in _BUCKET_DTYPES
            or self.workers > MAX_CHECKSUM_WORKERS
            or previous in self._bucketed
            or len(self._bucketed) >= _MAX_REMEMBERED
        ):
            return
        if len(self._occurrences) >= _MAX_REMEMBERED:
            self._occurrences.clear()
        key = previous, checksum
        times = self._occurrences[key] = self._occurrences.get(key, 0) + 1
        if times not in _COMPARE_AT and times % _COMPARE_EVERY:
            return
        local = split()  # workers without buckets take part, too
        number = 0 if local is None else int.from_bytes(local.layout_checksum())
        if self._all_equal(number, values.device) and local is not None:
            self._expected.pop(previous, None)
            self._bucketed[previous] = local
            self.pending = self._bucketed.get(self._previous)
            local.agree(self, checksum, values)

    def _expect_after(
        self, previous: bytes, checksum: bytes, buffer: torch.Tensor
    ) -> None:
        if (
            previous in self._expected
            or previous in self._bucketed
            or buffer.dtype not in _EXACT_DTYPES
            or self.workers > MAX_CHECKSUM_WORKERS
            or buffer[:-CHECKSUM_TAIL].nbytes > _MAX_EXPECTED_BYTES
        ):
            return
        if len(self._expected) >= _MAX_REMEMBERED:
            self._expected.clear()
        self._expected[previous] = _ExpectedSum(checksum, buffer, self.workers)

    def _sum_and_check(self, buffer: torch.Tensor, expected: _ExpectedSum) -> bool:
        tail = buffer[-CHECKSUM_TAIL:]
        tail.copy_(expected.tail)
        self.all_reduce(buffer, dist.ReduceOp.SUM)
        return tail.tolist() == expected.tail_sum
