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
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch._utils import _unflatten_dense_tensors

from keras_strategy.backends.torch.collective_check import (
    BucketedAllReduce,
    BucketPlan,
    CollectiveVerifier,
)
from keras_strategy.core.collectives import CHECKSUM_TAIL
from keras_strategy.keras_patches.variables_optimizers import stored_value

# As DistributedDataParallel has them. The first variables' gradients come last, and
# nothing hides their bucket, so it is smaller.
FIRST_BUCKET_BYTES: int = dist._DEFAULT_FIRST_BUCKET_BYTES  # pyright: ignore
MAX_BUCKET_BYTES = 25 << 20
_MAX_BUFFERS = 4

_Item = TypeVar("_Item")
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
        """Flatten and join tensors of one dtype and device.

        Returns:
            A tensor of one dimension: their elements, and `CHECKSUM_TAIL` free ones.
        """
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
        """Drop all buffers."""
        self._buffers.clear()


def unflatten(
    flat: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Split a flat buffer into views with the shapes of tensors."""
    # One C++ call for all of them, as in DistributedDataParallel.
    return list(_unflatten_dense_tensors(flat, tensors))


def split_by_bytes(
    items: Sequence[_Item], tensor_of: Callable[[_Item], torch.Tensor], max_bytes: int
) -> Iterator[list[_Item]]:
    """Split items into consecutive groups of one dtype and limited size.

    Args:
        items: Items with a tensor each.
        tensor_of: Returns an item's tensor.
        max_bytes: The most bytes of a group; a larger tensor is a group by itself.
    """
    group: list[_Item] = []
    size = 0
    for item in items:
        tensor = tensor_of(item)
        if group and (
            tensor_of(group[0]).dtype != tensor.dtype
            or size + tensor.nbytes > max_bytes
        ):
            yield group
            group, size = [], 0
        group.append(item)
        size += tensor.nbytes
    if group:
        yield group


class OverlappedAllReduce:
    """The gradient sums of one process that are sent during backward.

    By default only on GPUs and between machines: workers on the CPUs of one machine
    would use the cores that compute.

    Args:
        verifier: What the workers expect of each other.
        bucket_bytes: The most bytes of a bucket, for any workers and steps; 0 for the
            best value, in Keras's own `train_step`. The user's step may change a
            gradient by its `data`, which torch does not notice.
        is_local: True if all workers are on this machine.

    Attributes:
        replica: The running replica, or None.
    """

    def __init__(self, verifier: CollectiveVerifier, bucket_bytes: int, is_local: bool):
        self.verifier = verifier
        self._bucket_bytes, self._is_local = bucket_bytes, is_local
        self.replica: Any = None

    def weighted_sums(
        self, gradients: Sequence[torch.Tensor], weight: float | None
    ) -> list[torch.Tensor] | None:
        """Return the weighted sums of gradients if they are the pending bucketed sum.

        Args:
            gradients: The optimizer's gradients, of one dtype and device.
            weight: See `Replica.weighted_sum`.

        Returns:
            New tensors; None if they are to be sent in one collective.
        """
        assert self.verifier.pending is not None
        buckets = cast(GradientBuckets, self.verifier.pending.plan)
        if not buckets.matches(gradients, weight):
            return None
        buckets.send_remaining(gradients, weight)
        sums = self.verifier.finish_pending()
        buckets.reset()
        return None if sums is None else buckets.unflatten(sums, gradients)

    def can_overlap(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Return True if gradients of Keras's own step are sent during backward."""
        return bool(self._bucket_bytes) or not self._is_local or gradients[0].is_cuda

    def plan(
        self, gradients: Sequence[torch.Tensor], variables: Any
    ) -> "GradientBuckets | None":
        """Return the buckets of gradients, or None if they are not to be split.

        Args:
            gradients: The optimizer's gradients.
            variables: Their variables; None if it is not an optimizer's sum.
        """
        if variables is None or self.replica is None:
            return None
        max_bytes = self._bucket_bytes
        if not max_bytes:
            if not (self.can_overlap(gradients) and self.replica.step.logs_are_metrics):
                return None
            max_bytes = MAX_BUCKET_BYTES
        parameters = [stored_value(variable) for variable in variables]
        if not all(
            parameter is not None and parameter.is_leaf and parameter.grad is gradient
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ):
            return None  # no hook reports when they are computed
        limits = [min(FIRST_BUCKET_BYTES, max_bytes), max_bytes]
        buckets: list[list[int]] = dist._compute_bucket_assignment_by_size(  # pyright: ignore
            parameters, limits
        )[0][::-1]
        if len(buckets) == 1:
            return None
        return GradientBuckets(self, parameters, buckets)


class GradientBuckets(BucketPlan):
    """The gradients of some variables, sent bucket by bucket during backward.

    Args:
        owner: The process's overlapped sums.
        parameters: The variables' tensors.
        buckets: The indices of each bucket's variables, in sending order.
    """

    def __init__(
        self,
        owner: OverlappedAllReduce,
        parameters: Sequence[torch.Tensor],
        buckets: Sequence[Sequence[int]],
    ):
        self._owner, self._buckets = owner, buckets
        self._kinds = [_kind(parameter) for parameter in parameters]
        super().__init__(
            [sum(parameters[i].numel() for i in indices) for indices in buckets],
            f"{[list(indices) for indices in buckets]} of {self._kinds}",
        )
        # Weak, so that the plan does not keep the model alive.
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._bucket_of = {i: b for b, indices in enumerate(buckets) for i in indices}
        self._hooks: list[Any] = []
        self._all_reduce: BucketedAllReduce | None = None
        self._weight: float | None = None
        self.reset()

    def reset(self) -> None:
        """Reset the buckets for the next backward pass."""
        self._is_ready = bytearray(len(self._parameters))
        self._missing = [len(indices) for indices in self._buckets]
        # The gradients of each bucket sent during backward, and their versions.
        self.early: list[tuple[list[torch.Tensor], list[int]]] = []
        self._is_stopped = False

    def on_agreed(self, all_reduce: BucketedAllReduce) -> None:
        self._all_reduce = all_reduce
        self._owner.replica.buffers.clear()  # that of the sum in one collective
        for index, parameter in enumerate(self._parameters):
            tensor = parameter()
            assert tensor is not None
            hook = functools.partial(_report_gradient, weakref.ref(self), index)
            self._hooks.append(tensor.register_post_accumulate_grad_hook(hook))

    def on_dropped(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._all_reduce, self.early = [], None, []

    def on_gradient(self, index: int) -> None:
        """Send the buckets that a variable's new gradient has completed.

        torch calls it, maybe in another thread.
        """
        all_reduce = self._all_reduce
        if self._owner.replica is None or all_reduce is None:
            return
        if self._is_ready[index]:  # a second gradient of this variable
            if all_reduce.sent:
                self._is_stopped = True
                return
            self.reset()
        self._is_ready[index] = 1
        bucket = self._bucket_of[index]
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0:
            self._send_complete(all_reduce)

    def _send_complete(self, all_reduce: BucketedAllReduce) -> None:
        """Send the next buckets that are complete, except for the last one."""
        while (
            all_reduce.sent < all_reduce.last
            and self._missing[all_reduce.sent] == 0
            and not self._is_stopped
            and self._owner.verifier.pending is all_reduce
        ):
            indices = self._buckets[all_reduce.sent]
            parameters = [self._parameters[i]() for i in indices]
            gradients: list[Any] = [p.grad for p in parameters if p is not None]
            if [_kind(gradient) for gradient in gradients] != [
                self._kinds[i] for i in indices
            ]:
                self._is_stopped = True
                return
            if all_reduce.sent == 0:
                self._weight = self._owner.replica.step.row_weight
            with torch.no_grad():
                self._send(all_reduce, gradients, self._weight)
            self.early.append((gradients, [g._version for g in gradients]))

    def _send(
        self,
        all_reduce: BucketedAllReduce,
        gradients: list[torch.Tensor],
        weight: float | None,
    ) -> None:
        if all_reduce.sent == 0:
            buffers = self._owner.replica.buffers
            all_reduce.begin(buffers.take(all_reduce.buffer_size, gradients[0]))
        values = all_reduce.values(all_reduce.sent)
        torch.cat([gradient.reshape(-1) for gradient in gradients], out=values)
        scale_in_place(values, weight)
        all_reduce.send()

    def matches(self, gradients: Sequence[torch.Tensor], weight: float | None) -> bool:
        """Return True if gradients are the expected ones, as they were sent early."""
        assert self._all_reduce is not None
        if [_kind(gradient) for gradient in gradients] != self._kinds:
            return False
        if not self._all_reduce.sent:
            return True
        if weight != self._weight:
            return False
        return all(
            gradients[index] is gradient and gradient._version == version
            for indices, (tensors, versions) in zip(
                self._buckets, self.early, strict=False
            )
            for index, gradient, version in zip(indices, tensors, versions, strict=True)
        )

    def send_remaining(
        self, gradients: Sequence[torch.Tensor], weight: float | None
    ) -> None:
        """Send the buckets that were not sent during backward."""
        all_reduce = self._all_reduce
        assert all_reduce is not None
        while all_reduce.sent <= all_reduce.last:
            indices = self._buckets[all_reduce.sent]
            self._send(all_reduce, [gradients[index] for index in indices], weight)

    def unflatten(
        self, sums: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return each gradient's sum, given those of the buckets."""
        results: list[Any] = [None] * len(gradients)
        for indices, flat in zip(self._buckets, sums, strict=True):
            views = unflatten(flat, [gradients[index] for index in indices])
            for index, view in zip(indices, views, strict=True):
                results[index] = view
        return results


def _report_gradient(
    buckets: "weakref.ref[GradientBuckets]", index: int, _: torch.Tensor
) -> None:
    target = buckets()
    if target is not None:
        target.on_gradient(index)


def scale_in_place(values: torch.Tensor, weight: float | None) -> None:
    """Multiply by a row weight; 0 selects zeros, so that a NaN cannot leak."""
    if weight == 0:
        values.zero_()
    elif weight is not None:
        values.mul_(weight)


def _kind(tensor: Any) -> Any:
    """Return what a gradient must match to be in a bucket; None if it cannot."""
    if tensor is None or tensor.layout is not torch.strided:
        return None
    return tensor.shape, tensor.dtype, tensor.device.type
