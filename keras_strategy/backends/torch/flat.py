"""Tensors that travel together, in memory that is kept from step to step."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch._utils import _unflatten_dense_tensors

from keras_strategy.core.workers import CHECKSUM_TAIL

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


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
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
