"""Workers compare what they are about to send, in the collective that sends it.

torch hangs or ends the process where the values of a collective have other sizes on
other workers. So what travels first has a size that follows from what all workers did
before, and tells what each is about to do.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

DIGEST_BYTES = 7
# What travels behind the values: the digest's bytes, and their squares.
TAIL = 2 * DIGEST_BYTES
# In these the sums of a digest's bytes and of their squares are exact.
_EXACT = (torch.float32, torch.float64, torch.int32, torch.int64)
_MOST_WORKERS = 256
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


class Announcements:
    """Sums tensors that all workers say to be the same operation's.

    Programs repeat themselves: the sum that came after an operation is expected to come
    after it again. Then its values travel at once, with the digest behind them. A
    worker that is about to do something else sends zeros in their place, so that the
    sizes agree, and by the digests all workers notice. Where nothing is expected, the
    digests travel alone.

    What is expected follows from operations that all workers took part in, so it is
    the same on all of them.

    Args:
        workers: How many there are.
        all_reduce: Combines a tensor of the same size on all workers, in place.
    """

    def __init__(
        self,
        workers: int,
        all_reduce: Callable[[torch.Tensor, dist.ReduceOp.RedOpType], object],
    ):
        self._workers = workers
        self._all_reduce = all_reduce
        self._last = b""
        self._expected: dict[bytes, _Sum] = {}  # by what came before
        # Where something else came the last time, as the logs at an epoch's end.
        self._doubted: set[bytes] = set()

    def compare(self, digest: bytes, device: torch.device) -> bool:
        """Whether all workers are about to do the same.

        Args:
            digest: What this worker is about to do, of `DIGEST_BYTES` bytes.
            device: Where its values are.
        """
        expected = self._expected.get(self._last)
        if expected is None:
            number = int.from_bytes(digest)
            # The largest of n and of -n are each other's negative if all n are equal.
            both = torch.tensor([number, -number], device=device)
            self._all_reduce(both, dist.ReduceOp.MAX)
            same = int(both[0]) == -int(both[1])
        else:
            # It is another digest than what was expected.
            nothing = torch.zeros(
                expected.size + TAIL, dtype=expected.dtype, device=expected.device
            )
            same = self._sum_and_compare(nothing, self._saying(digest, nothing))
        if same:
            self._doubt()
            self._last = digest
        return same

    def _doubt(self) -> None:
        """What is expected has not come; the second time in a row it is forgotten."""
        if self._last in self._doubted:
            del self._expected[self._last]
            self._doubted.remove(self._last)
        elif self._last in self._expected:
            self._doubted.add(self._last)

    def sum(self, digest: bytes, flat: torch.Tensor) -> torch.Tensor | None:
        """The sum of the workers' tensors.

        Args:
            digest: What this worker adds up, its size and dtype included.
            flat: A tensor of one dimension.

        Returns:
            A new tensor; None if the workers are about to do different things.
        """
        both = flat.new_empty(flat.numel() + TAIL)
        both[:-TAIL].copy_(flat)
        return both[:-TAIL] if self.sum_in_place(digest, both) else None

    def sum_in_place(self, digest: bytes, both: torch.Tensor) -> bool:
        """Makes a tensor the sum of the workers' tensors.

        Args:
            digest: What this worker adds up, its size and dtype included.
            both: A tensor of one dimension, of which the last `TAIL` elements are room
                for what travels behind the values.

        Returns:
            Whether all workers add up the same.
        """
        before = self._last
        expected = self._expected.get(before)
        if expected is not None and expected.digest == digest:
            same = self._sum_and_compare(both, expected)
            if same:
                self._doubted.discard(before)
                self._last = digest
            return same
        if not self.compare(digest, both.device):
            return False
        values = both[:-TAIL]
        self._all_reduce(values, dist.ReduceOp.SUM)
        if (
            before not in self._expected
            and values.dtype in _EXACT
            and self._workers <= _MOST_WORKERS
            and values.nbytes <= _LARGEST_BYTES
        ):
            if len(self._expected) >= _MOST_REMEMBERED:
                self._expected.clear()
                self._doubted.clear()
            self._expected[before] = self._saying(digest, both)
        return True

    def _saying(self, digest: bytes, both: torch.Tensor) -> _Sum:
        said = [*digest, *(byte * byte for byte in digest)]
        return _Sum(
            digest,
            both.numel() - TAIL,
            both.dtype,
            both.device,
            both.new_tensor(said),
            # They are all equal if their mean is one of them and their variance is 0.
            [self._workers * number for number in said],
        )

    def _sum_and_compare(self, both: torch.Tensor, sum_: _Sum) -> bool:
        tail = both[-TAIL:]
        tail.copy_(sum_.said)
        self._all_reduce(both, dist.ReduceOp.SUM)
        return tail.tolist() == sum_.told
