"""Gradient buckets for an all-reduce that overlaps with the backward pass.

Each bucket is sent when backward has computed its gradients. The buckets are those of
DistributedDataParallel, in its order. Its reducer is not used: it overwrites the
gradients, which a step may read, change or give to no optimizer; it weights all workers
equally; and it fails or hangs when a step takes another path through the model. Here
the gradients stay as backward left them. What was sent early counts if the optimizer
receives the same tensors, unmodified since; otherwise the sum is made again.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._utils import _unflatten_dense_tensors

from keras_strategy.core.collectives import CHECKSUM_TAIL

# As DistributedDataParallel has them. The first variables' gradients come last, and
# nothing hides their bucket, so it is smaller.
FIRST_BUCKET_BYTES: int = dist._DEFAULT_FIRST_BUCKET_BYTES  # pyright: ignore
MAX_BUCKET_BYTES = 25 << 20
# How often in a row gradients may be changed after they were sent.
_MAX_STALE = 3

_use_count: Callable[[Any], int] = torch._C._storage_Use_Count  # pyright: ignore


class FlatBufferPool:
    """Flat buffers that are reused in each step."""

    # The system hands out new memory page by page when it is first written, which is
    # slow. A buffer that is still referenced elsewhere, such as by an optimizer that
    # keeps its gradients, is not reused.

    def __init__(self, max_buffers: int = 4) -> None:
        self._max_buffers = max_buffers
        self._buffers: dict[Any, tuple[torch.Tensor, int]] = {}

    def take(self, size: int, like: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised buffer of a tensor's dtype, on its device."""
        # A tensor made in inference mode can only be written in this mode.
        key = size, like.dtype, like.device, torch.is_inference_mode_enabled()
        entry = self._buffers.pop(key, None)
        if entry is None or _use_count(entry[0].untyped_storage()._cdata) != entry[1]:
            if len(self._buffers) >= self._max_buffers > 0:  # before memory is taken
                self._buffers.pop(next(iter(self._buffers)))  # the least recently used
            buffer = like.new_empty(size)
            entry = buffer, _use_count(buffer.untyped_storage()._cdata)
        if self._max_buffers:
            self._buffers[key] = entry
        return entry[0].view(-1)  # another tensor, which counts as a use

    def clear(self) -> None:
        self._buffers.clear()


def write_weighted(
    values: torch.Tensor, tensors: Sequence[torch.Tensor], weight: float | None
) -> None:
    """Write the elements of tensors, times a row weight, to a flat buffer."""
    torch.cat([tensor.reshape(-1) for tensor in tensors], out=values)
    scale_in_place(values, weight)


def scale_in_place(values: torch.Tensor, weight: float | None) -> None:
    """Multiply by a row weight; 0 selects zeros, so that a NaN cannot leak."""
    if weight == 0:
        values.zero_()
    elif weight is not None:
        values.mul_(weight)


def unflatten(
    flat: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Split a flat buffer into views with the shapes of tensors."""
    # One C++ call for all of them, as in DistributedDataParallel.
    return list(_unflatten_dense_tensors(flat, tensors))


def bucket_by_size(tensors: Sequence[torch.Tensor], *max_bytes: int) -> list[list[int]]:
    """Return the indices of each bucket's tensors, which have one dtype and device."""
    assign: Any = dist._compute_bucket_assignment_by_size  # pyright: ignore
    return assign(tensors, list(max_bytes))[0] if tensors else []


class GradientBuckets:
    """The gradients of some variables, of which backward sends complete buckets."""

    # `buckets` are the indices of each bucket's variables, in sending order; `checksum`
    # identifies the sum of them. The variables' hooks keep this object alive.

    def __init__(
        self,
        workers: Any,
        checksum: bytes,
        parameters: Sequence[torch.Tensor],
        buckets: Sequence[Sequence[int]],
    ):
        self._workers, self._checksum, self._buckets = workers, checksum, buckets
        self._sizes = [sum([parameters[i].numel() for i in b]) for b in buckets]
        # Weak, so that the buckets do not keep the model alive.
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        for index, parameter in enumerate(parameters):
            hook = functools.partial(self._on_gradient, index)
            parameter.register_post_accumulate_grad_hook(hook)
        self._stale = 0  # how often in a row what was sent did not count
        self._buffer: Any = None  # of what is sent
        self._reset()

    def _reset(self) -> None:
        """Expect the next backward pass."""
        self._ready: set[int] = set()
        # The gradients sent early, by index, with their versions.
        self.early: dict[int, tuple[torch.Tensor, int]] = {}
        self._is_stopped = self._stale >= _MAX_STALE

    def _on_gradient(self, index: int, _: torch.Tensor) -> None:
        """Send the buckets that a variable's new gradient has completed."""
        # torch calls it, maybe in another thread.
        verifier = self._workers.verifier
        if self._workers.replica is None:
            return
        if index in self._ready:  # a second gradient of this variable
            if verifier.sent:
                self._is_stopped = True
                return
            self._reset()
        self._ready.add(index)
        while (
            not self._is_stopped
            and verifier.sent < len(self._buckets) - 1
            and self._ready.issuperset(self._buckets[verifier.sent])
            and verifier.expects(self._checksum)
        ):
            self._send_early(self._buckets[verifier.sent])

    def _send_early(self, indices: Sequence[int]) -> None:
        replica, bucket = self._workers.replica, self._workers.verifier.sent
        gradients: Any = [getattr(self._parameters[i](), "grad", None) for i in indices]
        if any(g is None or g.layout is not torch.strided for g in gradients):
            self._is_stopped = True
            return
        if bucket == 0:
            self.early, self._weight = {}, replica.step.row_weight
            size = sum(self._sizes) + CHECKSUM_TAIL
            self._buffer = replica.buffers.take(size, gradients[0])
        values = self._buffer[:-CHECKSUM_TAIL].split(self._sizes)[bucket]
        with torch.no_grad():
            write_weighted(values, gradients, self._weight)
        self._workers.verifier.send(values)
        self.early.update(
            (i, (g, g._version)) for i, g in zip(indices, gradients, strict=True)
        )

    def end(
        self, gradients: Sequence[torch.Tensor], weight: float | None
    ) -> torch.Tensor | None:
        """Return the buffer of which a part was sent; None if that does not count."""
        buffer = None
        if self.early and self._workers.verifier.sent:
            # Another model's buckets may have the same sizes.
            known = self._weight, len(self._parameters)
            if (weight, len(gradients)) == known and all(
                gradients[index] is tensor and tensor._version == version
                for index, (tensor, version) in self.early.items()
            ):
                buffer = self._buffer
            self._stale = 0 if buffer is not None else self._stale + 1
        self._buffer = None
        self._reset()
        return buffer
