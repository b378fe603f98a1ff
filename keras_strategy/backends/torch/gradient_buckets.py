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
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._utils import _unflatten_dense_tensors

from keras_strategy.backends.torch.collective_check import BucketedAllReduce
from keras_strategy.core.collectives import CHECKSUM_TAIL

if TYPE_CHECKING:
    from keras_strategy.backends.torch.collectives import TorchWorkers

# As DistributedDataParallel has them. The first variables' gradients come last, and
# nothing hides their bucket, so it is smaller.
FIRST_BUCKET_BYTES: int = dist._DEFAULT_FIRST_BUCKET_BYTES  # pyright: ignore
MAX_BUCKET_BYTES = 25 << 20
_MAX_BUFFERS = 4

_use_count: Callable[[Any], int] = torch._C._storage_Use_Count  # pyright: ignore


class FlatBufferPool:
    """Flat buffers that are reused in each step.

    The system hands out new memory page by page when it is first written, which is
    slow. A buffer that is still referenced elsewhere, such as by an optimizer that
    keeps its gradients, is not reused.
    """

    def __init__(self) -> None:
        self._buffers: dict[Any, tuple[torch.Tensor, int]] = {}

    def concatenate(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join the elements of tensors of one dtype, and `CHECKSUM_TAIL` free ones."""
        size = sum([tensor.numel() for tensor in tensors])
        buffer = self.take(size + CHECKSUM_TAIL, tensors[0])
        torch.cat([tensor.reshape(-1) for tensor in tensors], out=buffer[:size])
        return buffer

    def take(self, size: int, like: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised buffer of a tensor's dtype, on its device."""
        # A tensor made in inference mode can only be written in this mode.
        key = size, like.dtype, like.device, torch.is_inference_mode_enabled()
        entry = self._buffers.pop(key, None)
        if entry is None or _use_count(entry[0].untyped_storage()._cdata) != entry[1]:
            buffer = like.new_empty(size)
            entry = buffer, _use_count(buffer.untyped_storage()._cdata)
        if len(self._buffers) >= _MAX_BUFFERS:
            self._buffers.pop(next(iter(self._buffers)))  # the least recently used
        self._buffers[key] = entry
        return entry[0]

    def clear(self) -> None:
        self._buffers.clear()


def unflatten(
    flat: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Split a flat buffer into views with the shapes of tensors."""
    # One C++ call for all of them, as in DistributedDataParallel.
    return list(_unflatten_dense_tensors(flat, tensors))


def split_by_bytes(tensors: Sequence[torch.Tensor], max_bytes: int) -> Iterator[slice]:
    """Split tensors into consecutive slices of one dtype and limited size.

    A larger tensor is a slice by itself.
    """
    begin = size = 0
    for end, tensor in enumerate(tensors):
        if end > begin and (
            tensors[begin].dtype != tensor.dtype or size + tensor.nbytes > max_bytes
        ):
            yield slice(begin, end)
            begin, size = end, 0
        size += tensor.nbytes
    if tensors:
        yield slice(begin, len(tensors))


class GradientBuckets(BucketedAllReduce):
    """The gradients of some variables, sent bucket by bucket during backward.

    `buckets` are the indices of each bucket's variables, in sending order.
    """

    def __init__(
        self,
        workers: "TorchWorkers",
        parameters: Sequence[torch.Tensor],
        buckets: Sequence[Sequence[int]],
    ):
        self._workers, self._indices = workers, buckets
        self._kinds = [_kind(parameter) for parameter in parameters]
        super().__init__(
            [sum(parameters[i].numel() for i in indices) for indices in buckets],
            f"{[list(indices) for indices in buckets]} of {self._kinds}",
        )
        # Weak, so that the buckets do not keep the model alive.
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._bucket_of = {i: b for b, indices in enumerate(buckets) for i in indices}
        self._hooks: list[Any] = []
        self._weight: float | None = None
        self._reset()

    def _reset(self) -> None:
        """Expect the next backward pass."""
        self._is_ready = bytearray(len(self._parameters))
        self._missing = [len(indices) for indices in self._indices]
        # The gradients of each bucket sent during backward, and their versions.
        self.early: list[tuple[list[torch.Tensor], list[int]]] = []
        self._is_stopped = False

    def agree(self, verifier: Any, checksum: bytes, like: torch.Tensor) -> None:
        super().agree(verifier, checksum, like)
        self._workers.replica.buffers.clear()  # that of the sum in one collective
        for index, parameter in enumerate(self._parameters):
            tensor = parameter()
            assert tensor is not None
            hook = functools.partial(_report_gradient, weakref.ref(self), index)
            self._hooks.append(tensor.register_post_accumulate_grad_hook(hook))

    def drop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.early = [], []

    def on_gradient(self, index: int) -> None:
        """Send the buckets that a variable's new gradient has completed.

        torch calls it, maybe in another thread.
        """
        if self._workers.replica is None:
            return
        if self._is_ready[index]:  # a second gradient of this variable
            if self.sent:
                self._is_stopped = True
                return
            self._reset()
        self._is_ready[index] = 1
        bucket = self._bucket_of[index]
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0:
            self._send_complete()

    def _send_complete(self) -> None:
        """Send the next buckets that are complete, except for the last one."""
        while (
            self.sent < len(self.sizes) - 1
            and self._missing[self.sent] == 0
            and not self._is_stopped
            and self._workers.verifier.pending is self
        ):
            indices = self._indices[self.sent]
            parameters = [self._parameters[i]() for i in indices]
            gradients: list[Any] = [p.grad for p in parameters if p is not None]
            if [_kind(gradient) for gradient in gradients] != [
                self._kinds[i] for i in indices
            ]:
                self._is_stopped = True
                return
            if self.sent == 0:
                self._weight = self._workers.replica.step.row_weight
            with torch.no_grad():
                self.send(gradients, self._weight)
            self.early.append((gradients, [g._version for g in gradients]))

    def send(self, tensors: Sequence[torch.Tensor], weight: float | None) -> None:
        if self.sent == 0:
            buffers = self._workers.replica.buffers
            self.begin(buffers.take(self.buffer_size, tensors[0]))
        super().send(tensors, weight)

    def weighted_sums(
        self, gradients: Sequence[torch.Tensor], weight: float | None
    ) -> list[torch.Tensor] | None:
        """Return the sums; None if the gradients are to be sent in one collective."""
        if [_kind(gradient) for gradient in gradients] != self._kinds:
            return None
        # Discard what was sent early if it is not the same gradients, unmodified since.
        if self.sent and weight != self._weight:
            return None
        for indices, (tensors, versions) in zip(
            self._indices, self.early if self.sent else [], strict=False
        ):
            for index, tensor, version in zip(indices, tensors, versions, strict=True):
                if gradients[index] is not tensor or tensor._version != version:
                    return None
        self.send_remaining(gradients, weight)
        sums = self._workers.verifier.finish_pending()
        self._reset()
        if sums is None:
            return None
        results: list[Any] = [None] * len(gradients)
        for indices, flat in zip(self._indices, sums, strict=True):
            views = unflatten(flat, [gradients[index] for index in indices])
            for index, view in zip(indices, views, strict=True):
                results[index] = view
        return results

    def send_remaining(
        self, gradients: Sequence[torch.Tensor], weight: float | None
    ) -> None:
        """Send the buckets that were not sent during backward."""
        for indices in self._indices[self.sent :]:
            self.send([gradients[index] for index in indices], weight)


def _report_gradient(
    buckets: "weakref.ref[GradientBuckets]", index: int, _: torch.Tensor
) -> None:
    target = buckets()
    if target is not None:
        target.on_gradient(index)


def _kind(tensor: Any) -> Any:
    """Return what a gradient must match to be in a bucket; None if it cannot."""
    if tensor is None or tensor.layout is not torch.strided:
        return None
    return tensor.shape, tensor.dtype, tensor.device.type
