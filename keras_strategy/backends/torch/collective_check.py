"""Sums over workers that detect workers in different operations.

torch hangs, or aborts the process, when workers start collectives of different sizes.
Programs repeat themselves, so the sum that followed an operation is expected to follow
it again. Its values are then sent at once, with a checksum behind them. A worker that
reaches another operation sends zeros of the expected size instead: the sizes agree, and
the checksums tell every worker to discard the result. When no sum is expected, the
checksums are compared first, in a collective of their own.

A sum may have several buckets, and all but the last may be sent while other values are
still being computed. The last one is sent when the sum is requested. So the checksum
behind it confirms all of them, and a worker that reaches another operation sends zeros
for those that it has not sent. The checksum identifies the buckets, too.

What is expected follows only from operations in which all workers took part, so it is
the same on all of them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from keras_strategy.core.collectives import (
    CHECKSUM_TAIL,
    MAX_CHECKSUM_WORKERS,
    checksum_tail,
)

# Checksums are summed exactly in these dtypes.
_EXACT_DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)
# A larger bucket takes longer than a comparison, and costs more if it is discarded.
_MAX_EXPECTED_BYTES = 16 << 20
_MAX_REMEMBERED = 1024


class _ExpectedSum:
    """A sum that all workers made after the same operation."""

    def __init__(
        self, checksum: bytes, buffer: torch.Tensor, sizes: Sequence[int], workers: int
    ):
        numbers = checksum_tail(checksum)
        self.checksum, self.sizes = checksum, sizes
        self.tail = buffer.new_tensor(numbers)  # what each worker sends at the end
        self.tail_sum = [workers * number for number in numbers]
        # True if another operation came last time, such as an epoch's logs.
        self.was_missed = False


class CollectiveVerifier:
    """Sums of flat buffers, whose last `CHECKSUM_TAIL` elements are free."""

    # `all_reduce` works in place, as `torch.distributed.all_reduce`.

    def __init__(self, workers: int, all_reduce: Callable[..., Any]):
        self._workers, self._all_reduce = workers, all_reduce
        self._previous = b""  # the checksum of the last operation
        # By the checksum of the operation before.
        self._expected: dict[bytes, _ExpectedSum] = {}
        self._works: list[Any] = []  # of the expected sum's buckets
        self.sent = 0  # how many of these

    def expects(self, checksum: bytes) -> bool:
        """Return True if all workers expect this sum next."""
        expected = self._expected.get(self._previous)
        return expected is not None and expected.checksum == checksum

    def send(self, bucket: torch.Tensor) -> None:
        """Send the next bucket of the expected sum; all but the last at any time."""
        self._works.append(self._all_reduce(bucket, async_op=True))
        self.sent += 1

    def verify(self, checksum: bytes, device: torch.device) -> bool:
        """Return True if all workers are about to run the same operation."""
        expected = self._expected.get(self._previous)
        if expected is None:
            same = self._all_equal(checksum, device)
        else:
            same = self._send_zeros(expected, checksum) or self._all_equal(
                checksum, expected.tail.device
            )
        if not same:
            return False
        if expected is not None and expected.checksum != checksum:
            if expected.was_missed:  # the second time in a row
                del self._expected[self._previous]
            expected.was_missed = True
        self._previous = checksum
        return True

    def sum_in_place(
        self,
        checksum: bytes,
        buffer: torch.Tensor,
        sizes: Sequence[int],
        fill: Callable[[int, torch.Tensor], None] | None = None,
        keeps_sent: bool = True,
    ) -> bool:
        """Sum a buffer in buckets of these numbers of elements."""
        # `fill` writes the values of a bucket, unless they are there already. With
        # `keeps_sent`, not those of buckets of this buffer that were sent before.
        # Return False if the workers are about to run different operations.
        previous, values = self._previous, buffer[:-CHECKSUM_TAIL].split(sizes)
        expected = self._expected.get(previous)
        if keeps_sent and expected is not None and expected.checksum == checksum:
            tail = buffer[-CHECKSUM_TAIL:]
            tail.copy_(expected.tail)
            parts = buffer.split(expected.sizes)
            for index in range(self.sent, len(parts)):
                if fill is not None:
                    fill(index, values[index])
                self.send(parts[index])
            self._wait()
            if tail.tolist() == expected.tail_sum:
                expected.was_missed = False
                self._previous = checksum
                return True
            # A worker is in another operation, or discards what it has sent.
            if not self._all_equal(checksum, buffer.device):
                return False
        elif not self.verify(checksum, buffer.device):
            return False
        self._previous = checksum
        for index, part in enumerate(values):
            if fill is not None:
                fill(index, part)
            self.send(part)
        self._wait()
        if (
            previous not in self._expected
            and buffer.dtype in _EXACT_DTYPES
            and self._workers <= MAX_CHECKSUM_WORKERS
            and (len(sizes) > 1 or values[0].nbytes <= _MAX_EXPECTED_BYTES)
        ):
            if len(self._expected) >= _MAX_REMEMBERED:
                self._expected.clear()
            with_tail = [*sizes[:-1], sizes[-1] + CHECKSUM_TAIL]
            expected = _ExpectedSum(checksum, buffer, with_tail, self._workers)
            self._expected[previous] = expected
        return True

    def _all_equal(self, checksum: bytes, device: torch.device) -> bool:
        number = int.from_bytes(checksum)
        # The maxima of n and of -n are each other's negative if all n are equal.
        maxima = torch.tensor([number, -number], device=device)
        self._all_reduce(maxima, dist.ReduceOp.MAX)
        return int(maxima[0]) == -int(maxima[1])

    def _send_zeros(self, expected: _ExpectedSum, checksum: bytes) -> bool:
        """Send zeros in place of the expected sum, with another one's checksum."""
        # Return True if all workers are in this other operation, or none keeps what it
        # has sent of the expected one.
        zeros = [expected.tail.new_zeros(size) for size in expected.sizes[self.sent :]]
        tail = zeros[-1][-CHECKSUM_TAIL:]
        if checksum != expected.checksum:
            tail.copy_(expected.tail.new_tensor(checksum_tail(checksum)))
        numbers = tail.tolist()
        for bucket in zeros:
            self.send(bucket)
        self._wait()
        return tail.tolist() == [self._workers * number for number in numbers]

    def _wait(self) -> None:
        works, self._works, self.sent = self._works, [], 0
        for work in works:
            work.wait()
