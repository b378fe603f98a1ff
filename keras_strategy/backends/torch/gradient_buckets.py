"""Tensors that travel together, in memory that is kept from step to step.

Gradients that travel while others are computed, as DistributedDataParallel's do.

Its own reducer is not used: it overwrites the gradients, which a step may read, change
or give to no optimizer; it weights all workers alike; and it fails, or waits for good,
where a step takes another way through the model than it did before. Here the gradients
stay what backward made of them. What left early counts if the optimizer is given the
very same tensors, to which nobody wrote in between. Otherwise the sum is made anew.

The pieces are those that DistributedDataParallel makes, in its order.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._utils import _unflatten_dense_tensors

from keras_strategy.backends.torch.collective_check import (
    BucketedAllReduce,
    BucketPlan,
    CollectiveVerifier,
)
from keras_strategy.core.collectives import CHECKSUM_TAIL
from keras_strategy.keras_patches.variables_optimizers import stored

_Item = TypeVar("_Item")
_MOST_KEPT = 4
# How many tensors there are of some memory.
_users: Callable[[Any], int] = torch._C._storage_Use_Count  # pyright: ignore


class FlatBufferPool:
    """Makes one tensor of several, in memory that is written again and again.

    The system hands out new memory page by page, as it is written for the first time.
    Memory that somebody still looks into, as an optimizer that keeps its gradients, is
    left to them.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[torch.Tensor, int]] = {}

    def __call__(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Joins tensors of one dtype, on one device.

        Args:
            tensors: One or more.

        Returns:
            A tensor of one dimension: their elements, and `CHECKSUM_TAIL` elements of room.
        """
        sizes = sum([tensor.numel() for tensor in tensors])
        joined = self.take(sizes + CHECKSUM_TAIL, tensors[0])
        torch.cat([tensor.reshape(-1) for tensor in tensors], out=joined[:sizes])
        return joined

    def take(self, size: int, like: torch.Tensor) -> torch.Tensor:
        """Memory for a tensor of one dimension, with whatever is in it.

        Args:
            size: The number of elements.
            like: A tensor of its dtype, on its device.
        """
        # What is made in this mode can be written to in this mode alone.
        mode = torch.is_inference_mode_enabled()
        key = size, like.dtype, like.device, mode
        kept = self._kept.pop(key, None)
        if kept is None or _users(kept[0].untyped_storage()._cdata) != kept[1]:
            fresh = like.new_empty(size)
            kept = fresh, _users(fresh.untyped_storage()._cdata)
        if len(self._kept) >= _MOST_KEPT:
            self._kept.pop(next(iter(self._kept)))  # that was used least lately
        self._kept[key] = kept
        return kept[0]

    def forget(self) -> None:
        """Keeps no memory that was used so far."""
        self._kept.clear()


def unflatten(
    flat: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The parts of what was joined, each with the shape of its tensor.

    Args:
        flat: What was joined, without the room behind it.
        tensors: What it was joined of.
    """
    # As DistributedDataParallel does it: not a call of Python's for each.
    return list(_unflatten_dense_tensors(flat, tensors))


def split_by_bytes(
    items: Sequence[_Item], tensor_of: Callable[[_Item], torch.Tensor], most: int
) -> Iterator[list[_Item]]:
    """What travels together: tensors of one dtype, and no more than need be at once.

    Args:
        items: What has a tensor each.
        tensor_of: Gives it.
        most: How many bytes travel at once; of a larger tensor all.
    """
    some: list[_Item] = []
    size = 0
    for item in items:
        tensor = tensor_of(item)
        first = tensor_of(some[0]) if some else tensor
        if some and (first.dtype != tensor.dtype or size + tensor.nbytes > most):
            yield some
            some, size = [], 0
        some.append(item)
        size += tensor.nbytes
    if some:
        yield some


# The most bytes of a piece: of that of the first variables, whose gradients come last
# and which nothing hides, and of the others. As DistributedDataParallel has them.
FIRST_BYTES: int = dist._DEFAULT_FIRST_BUCKET_BYTES  # pyright: ignore
MOST_BYTES = 25 << 20


class OverlappedAllReduce:
    """The sums of gradients that leave during backward, in one process.

    By itself it is done on GPUs and between machines. Where the workers are on the CPUs
    of one machine, the cores that would carry the values are those that compute.

    Args:
        announcements: What the workers expect of each other.
        most: The most bytes of a piece, wherever the workers are and whatever the step
            does; 0 for what is best, in Keras's own `train_step`. A step of the user's
            may change a gradient by its `data`, which torch does not notice.
        is_local: Whether all workers are on this machine.

    Attributes:
        replica: The replica that is running, or None.
    """

    def __init__(self, announcements: CollectiveVerifier, most: int, is_local: bool):
        self.announcements = announcements
        self._most, self._is_local = most, is_local
        self.replica: Any = None

    def sums(
        self, gradients: Sequence[torch.Tensor], weight: float | None
    ) -> list[torch.Tensor] | None:
        """The weighted sums of gradients, if it is they that are due in pieces.

        Args:
            gradients: What an optimizer is given, of one dtype and on one device.
            weight: See `Replica.weighted_sum`.

        Returns:
            New tensors; None if they are to travel in one piece.
        """
        assert self.announcements.due is not None
        leaving: GradientBuckets = self.announcements.due.plan.of
        if not leaving.are(gradients, weight):
            return None
        leaving.send_the_rest(gradients, weight)
        sums = self.announcements.end_pieces()
        leaving.restart()
        return None if sums is None else leaving.parted(sums, gradients)

    def can_overlap(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Whether gradients travel during backward, where a step is one of Keras's."""
        return bool(self._most) or not self._is_local or gradients[0].is_cuda

    def plan(
        self, gradients: Sequence[torch.Tensor], variables: Any
    ) -> BucketPlan | None:
        """How gradients would travel in pieces, None if they would not.

        Args:
            gradients: What an optimizer was given.
            variables: What they are gradients of; None where it is no optimizer's sum.
        """
        if variables is None or self.replica is None:
            return None
        most = self._most
        if not most:
            stay = not self.can_overlap(gradients)
            if stay or not self.replica.step.logs_are_metrics:
                return None
            most = MOST_BYTES
        parameters = [stored(variable) for variable in variables]
        if not all(
            parameter is not None and parameter.is_leaf and parameter.grad is gradient
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ):
            return None  # nothing tells when one of them is there
        limits = [min(FIRST_BYTES, most), most]
        parts: list[list[int]] = dist._compute_bucket_assignment_by_size(  # pyright: ignore
            parameters, limits
        )[0][::-1]
        if len(parts) == 1:
            return None
        return GradientBuckets(self, parameters, parts).plan


class GradientBuckets:
    """The gradients of some variables, of which each piece leaves when it is there.

    Args:
        owner: Whose they are.
        parameters: The variables' tensors.
        parts: The indices of each piece, in the order in which they leave.
    """

    def __init__(
        self,
        owner: OverlappedAllReduce,
        parameters: Sequence[torch.Tensor],
        parts: Sequence[Sequence[int]],
    ):
        self._owner, self._parts = owner, parts
        self._kinds = [_kind(parameter) for parameter in parameters]
        # The model does not live on for them.
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._part_of = [0] * len(parameters)
        for part, indices in enumerate(parts):
            for index in indices:
                self._part_of[index] = part
        self._hooks: list[Any] = []
        self._pieces: BucketedAllReduce | None = None
        self._weight: float | None = None
        self.plan = BucketPlan(
            [sum(parameters[i].numel() for i in indices) for indices in parts],
            f"{[list(indices) for indices in parts]} of {self._kinds}",
            self,
            self._listen,
            self._listen_no_more,
        )
        self.restart()

    def restart(self) -> None:
        """None of the gradients is there yet."""
        self._is_there = bytearray(len(self._parameters))
        self._missing = [len(indices) for indices in self._parts]
        # What has left: the gradients of each piece, and their versions.
        self._left: list[tuple[list[torch.Tensor], list[int]]] = []
        self._is_over = False

    def _listen(self, pieces: BucketedAllReduce) -> None:
        self._pieces = pieces
        self._owner.replica.joined.forget()  # that of the sum in one piece
        myself = weakref.ref(self)

        def listener(index):
            def has_come(_):
                leaving = myself()
                if leaving is not None:
                    leaving.has_come(index)

            return has_come

        for index, parameter in enumerate(self._parameters):
            tensor = parameter()
            assert tensor is not None
            hook = tensor.register_post_accumulate_grad_hook(listener(index))
            self._hooks.append(hook)

    def _listen_no_more(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._pieces, self._left = [], None, []

    def has_come(self, index: int) -> None:
        """A gradient is there. Called by torch, maybe in a thread of its own.

        Args:
            index: The number of the variable.
        """
        pieces = self._pieces
        if self._owner.replica is None or pieces is None:
            return
        if self._is_there[index]:  # it is another one than what was there
            if pieces.sent:
                self._is_over = True
                return
            self.restart()
        self._is_there[index] = 1
        part = self._part_of[index]
        self._missing[part] -= 1
        if self._missing[part] == 0:
            self._send_what_is_there(pieces)

    def _send_what_is_there(self, pieces: BucketedAllReduce) -> None:
        """Sends the next pieces that are there, but for the last one."""
        weight = self._owner.replica.step.row_weight
        while (
            pieces.sent < pieces.last
            and self._missing[pieces.sent] == 0
            and not self._is_over
            and self._owner.announcements.due is pieces
        ):
            parameters = [self._parameters[i]() for i in self._parts[pieces.sent]]
            gradients: list[Any] = [p.grad for p in parameters if p is not None]
            kinds = [self._kinds[i] for i in self._parts[pieces.sent]]
            if [_kind(gradient) for gradient in gradients] != kinds:
                self._is_over = True
                return
            if pieces.sent == 0:
                self._weight = weight
            with torch.no_grad():
                self._send(pieces, gradients, self._weight)
            self._left.append((gradients, [g._version for g in gradients]))

    def _send(
        self,
        pieces: BucketedAllReduce,
        gradients: list[torch.Tensor],
        weight: float | None,
    ) -> None:
        if pieces.sent == 0:
            joined = self._owner.replica.joined
            pieces.begin(joined.take(pieces.room, gradients[0]))
        values = pieces.values(pieces.sent)
        torch.cat([gradient.reshape(-1) for gradient in gradients], out=values)
        if weight == 0:
            values.zero_()
        elif weight is not None:
            values.mul_(weight)
        pieces.send()

    def are(self, gradients: Sequence[torch.Tensor], weight: float | None) -> bool:
        """Whether gradients are the expected ones, and what has left is of them.

        Args:
            gradients: What an optimizer is given.
            weight: This replica's row weight.
        """
        assert self._pieces is not None
        if [_kind(gradient) for gradient in gradients] != self._kinds:
            return False
        if not self._pieces.sent:
            return True
        if weight != self._weight:
            return False
        left = zip(self._parts, self._left, strict=False)  # the first of them
        return all(
            gradients[index] is gradient and gradient._version == version
            for indices, (tensors, versions) in left
            for index, gradient, version in zip(indices, tensors, versions, strict=True)
        )

    def send_the_rest(
        self, gradients: Sequence[torch.Tensor], weight: float | None
    ) -> None:
        """Sends the pieces that have not left yet.

        Args:
            gradients: All of them.
            weight: This replica's row weight.
        """
        pieces = self._pieces
        assert pieces is not None
        while pieces.sent <= pieces.last:
            indices = self._parts[pieces.sent]
            self._send(pieces, [gradients[index] for index in indices], weight)

    def parted(
        self, sums: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The sums of the gradients, each with its shape.

        Args:
            sums: Those of the pieces.
            gradients: The gradients.
        """
        results: list[Any] = [None] * len(gradients)
        for indices, flat in zip(self._parts, sums, strict=True):
            of_part = unflatten(flat, [gradients[index] for index in indices])
            for index, tensor in zip(indices, of_part, strict=True):
                results[index] = tensor
        return results


def _kind(tensor: Any) -> Any:
    """What a gradient must be to travel in a piece; None if it cannot."""
    if tensor is None or tensor.layout is not torch.strided:
        return None
    return tensor.shape, tensor.dtype, tensor.device.type
