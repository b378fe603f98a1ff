"""Collectives between the processes of a cluster, by torch.distributed."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from keras_strategy.backends.torch import connection
from keras_strategy.backends.torch.collective_check import CollectiveVerifier
from keras_strategy.backends.torch.gradient_buckets import (
    FIRST_BYTES,
    MOST_BYTES,
    FlatBufferPool,
    OverlappedAllReduce,
    split_by_bytes,
    unflatten,
)
from keras_strategy.cluster.membership import Cluster
from keras_strategy.core.collectives import (
    CHECKSUM_TAIL,
    WorkerCollectives,
    call_checksum,
    operation_kind,
)
from keras_strategy.training.sharding import FlatShards


class TorchWorkers(WorkerCollectives):
    """See `core.workers.Workers`.

    torch hangs or ends the process where the workers do different things. So what they
    are about to do is compared in the collective that does it: see `announcing`.

    Attributes:
        during_backward: The sums of gradients that leave while others are computed.
    """

    def __init__(self, cluster: Cluster):
        super().__init__(cluster)
        most = cluster.options.bytes_per_pack
        self._announcements = CollectiveVerifier(
            self.size,
            lambda tensor, op: dist.all_reduce(tensor, op=op),
            _start,
            most or FIRST_BYTES,
        )
        self.during_backward = OverlappedAllReduce(
            self._announcements, most, cluster.is_local
        )

    def sum(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        shape = tuple(tensor.shape)
        if tensor.dtype == torch.bool:
            self._require_same(name, tensor, shape)
            raise TypeError(f"`{name}` adds numbers. Received a tensor of booleans.")
        digest = _digest(name, tensor, shape)
        with self.track_operation(name):
            total = self._announcements.sum(digest, tensor.reshape(-1))
        if total is None:
            raise self._difference(name, tensor, shape)
        return total.view(shape)

    def all_reduce_weighted(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        weight: float | None,
        joined: FlatBufferPool,
        variables: Sequence[Any] | None,
    ) -> list[torch.Tensor]:
        """The sums of the workers' weighted tensors.

        Args:
            name: What they are for.
            tensors: Tensors of one dtype and on one device.
            weight: What they are to be multiplied with, see `Replica.weighted_sum`.
            joined: Makes one tensor of them.
            variables: What they are gradients of; None where they are none.
        """
        with self.track_operation(name):
            if self._announcements.due is not None:
                sums = self.during_backward.sums(tensors, weight)
                if sums is not None:
                    return sums
            both = joined(tensors)
            flat = both[:-CHECKSUM_TAIL]
            if weight == 0:
                flat.zero_()
            elif weight is not None:
                flat.mul_(weight)
            shape = tuple(flat.shape)
            plan = functools.partial(self.during_backward.plan, tensors, variables)
            digest = _digest(name, flat, shape)
            same = self._announcements.sum_in_place(digest, both, plan)
        if not same:
            raise self._difference(name, flat, shape)
        return unflatten(flat, tensors)

    def reduce_scatter_weighted(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        weight: float | None,
        shares: Sequence[FlatShards],
    ) -> list[torch.Tensor]:
        """This worker's shares of the sums of the workers' weighted tensors.

        Each sends the others their shares, and adds up what it is sent: it is half of
        what the whole sums take. gloo's own `reduce_scatter` sends as much as those.

        Args:
            name: What they are for.
            tensors: Tensors of one dtype and on one device.
            weight: See `all_reduce_weighted`.
            shares: For each which elements each worker gets, by rank.
        """
        shape = (sum([tensor.numel() for tensor in tensors]),)
        self._require_same(f"{name} (shares)", tensors[0], shape)
        pairs = [(t.reshape(-1), of) for t, of in zip(tensors, shares, strict=True)]
        results: list[torch.Tensor] = []
        for some in split_by_bytes(pairs, lambda pair: pair[0], MOST_BYTES):
            bounds = [[of.bounds[r] for _, of in some] for r in range(self.size)]
            sizes = [[end - begin for begin, end in own] for own in bounds]
            sent = torch.cat(
                [
                    tensor[begin:end]
                    for own in bounds
                    for (tensor, _), (begin, end) in zip(some, own, strict=True)
                ]
            )
            if weight == 0:
                sent.zero_()
            elif weight is not None:
                sent.mul_(weight)
            mine = sizes[self.rank]
            every = sent.new_empty(self.size * sum(mine))
            with self.track_operation(name):
                dist.all_to_all_single(
                    every, sent, [sum(mine)] * self.size, list(map(sum, sizes))
                )
            parts = every.view(self.size, sum(mine)).sum(0).split(mine)
            for part, (_, of) in zip(parts, some, strict=True):
                results.append(part.view(of.shape_of(self.rank)))
        return results

    def sum_all(self, name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return map_flattened(tensors, lambda flat: self.sum(name, flat))

    def gather(
        self, name: str, tensor: torch.Tensor, axis: int
    ) -> tuple[torch.Tensor, list[int]]:
        axis %= max(tensor.ndim, 1)
        tensor = tensor.detach()
        others = tuple(tensor.shape[:axis]) + tuple(tensor.shape[axis + 1 :])
        self._require_same(name, tensor, others, f" other than axis {axis}")
        size = torch.tensor([tensor.shape[axis]], device=tensor.device)
        sizes = [torch.empty_like(size) for _ in range(self.size)]
        with self.track_operation(name):
            dist.all_gather(sizes, size)
        counts = [int(s) for s in sizes]
        # The axis comes first, since what is sent is padded to the longest.
        rows = tensor.movedim(axis, 0)
        boolean = rows.dtype == torch.bool
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        if boolean:
            padded = padded.to(torch.uint8)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        with self.track_operation(name):
            dist.all_gather(parts, padded)
        pieces = zip(parts, counts, strict=True)
        joined = torch.cat([part[:count] for part, count in pieces])
        if boolean:
            joined = joined.to(torch.bool)
        return joined.movedim(0, axis), counts

    def all_gather_flat(
        self, name: str, tensor: torch.Tensor, sizes: Sequence[int]
    ) -> torch.Tensor:
        """The workers' tensors of one dimension, whose sizes all of them know.

        What they did just before has shown that they are in the same operation.

        Args:
            name: What it is for.
            tensor: This worker's.
            sizes: How many elements each worker has, by rank.
        """
        most = max(sizes)
        sent = tensor
        if len(sent) < most:  # what is sent has one size
            sent = tensor.new_zeros(most)
            sent[: len(tensor)] = tensor
        every = sent.new_empty(most * self.size)
        with self.track_operation(name):
            dist.all_gather_into_tensor(every, sent)
        parts = every.split(most)
        return torch.cat([p[:size] for p, size in zip(parts, sizes, strict=True)])

    def broadcast(
        self, name: str, tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        results = []
        for tensor in tensors:
            self._require_same(name, tensor, tuple(tensor.shape))
            sent = tensor.detach().clone(memory_format=torch.contiguous_format)
            if tensor.dtype == torch.bool:
                sent = sent.to(torch.uint8)
            with self.track_operation(name):
                dist.broadcast(sent, src=0)
            results.append(sent.to(tensor.dtype))
        return results

    def _require_same(
        self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], which: str = ""
    ) -> None:
        digest = _digest(name, tensor, shape)
        with self.track_operation(name):
            same = self._announcements.compare(digest, tensor.device)
        if not same:
            raise self._difference(name, tensor, shape, which)

    def _difference(
        self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], which: str = ""
    ) -> Exception:
        return self.mismatch_error(name, [list(shape), str(tensor.dtype)], which)


def _start(tensor: torch.Tensor) -> Any:
    return dist.all_reduce(tensor, async_op=True)


def _digest(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> bytes:
    return call_checksum(operation_kind(name), shape, tensor.dtype)


def map_flattened(
    tensors: Sequence[torch.Tensor], fn: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """Applies an elementwise function to all tensors of a dtype at once.

    Args:
        tensors: The tensors.
        fn: A function of a flat tensor.

    Returns:
        A tensor for each, of its shape.
    """
    results: list[Any] = [None] * len(tensors)
    by_kind: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(index)
    for indices in by_kind.values():
        parts = [tensors[index] for index in indices]
        flat = fn(torch.cat([part.reshape(-1) for part in parts]))
        pieces = flat.split([part.numel() for part in parts])
        for index, part, piece in zip(indices, parts, pieces, strict=True):
            results[index] = piece.view(part.shape)
    return results


_connected: TorchWorkers | None = None


def connect(cluster: Cluster) -> TorchWorkers:
    """Connects this process with the others of a cluster, once."""
    global _connected
    if _connected is None:
        connection.connect(cluster)
        _connected = TorchWorkers(cluster)
    return _connected
