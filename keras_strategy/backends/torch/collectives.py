"""Collectives between the processes of a cluster, by torch.distributed."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from keras_strategy.backends.torch import connection
from keras_strategy.backends.torch.collective_check import CollectiveVerifier
from keras_strategy.backends.torch.gradient_buckets import (
    FIRST_BUCKET_BYTES,
    MAX_BUCKET_BYTES,
    FlatBufferPool,
    OverlappedAllReduce,
    scale_in_place,
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
    """Collectives that are verified before or while they run, see `collective_check`.

    Attributes:
        overlapped: The gradient sums that are sent during backward.
    """

    def __init__(self, cluster: Cluster):
        super().__init__(cluster)
        bucket_bytes = cluster.options.bytes_per_pack
        self._verifier = CollectiveVerifier(
            self.size,
            lambda tensor, op: dist.all_reduce(tensor, op=op),
            _start_all_reduce,
            bucket_bytes or FIRST_BUCKET_BYTES,
        )
        self.overlapped = OverlappedAllReduce(
            self._verifier, bucket_bytes, cluster.is_local
        )

    def sum(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        shape = tuple(tensor.shape)
        if tensor.dtype == torch.bool:
            self._verify(name, tensor, shape)
            raise TypeError(f"`{name}` adds numbers. Received a tensor of booleans.")
        checksum = _checksum(name, tensor, shape)
        with self.track_operation(name):
            total = self._verifier.sum(checksum, tensor.reshape(-1))
        if total is None:
            raise self._mismatch(name, tensor, shape)
        return total.view(shape)

    def all_reduce_weighted(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        weight: float | None,
        buffers: FlatBufferPool,
        variables: Sequence[Any] | None,
    ) -> list[torch.Tensor]:
        """Sum the workers' weighted tensors.

        Args:
            name: What they are for.
            tensors: Tensors of one dtype and device.
            weight: See `Replica.weighted_sum`.
            buffers: Where to take a flat buffer from.
            variables: The variables whose gradients they are; None for other tensors.
        """
        with self.track_operation(name):
            if self._verifier.pending is not None:
                sums = self.overlapped.weighted_sums(tensors, weight)
                if sums is not None:
                    return sums
            buffer = buffers.concatenate(tensors)
            flat = buffer[:-CHECKSUM_TAIL]
            if weight == 0:
                flat.zero_()
            elif weight is not None:
                flat.mul_(weight)
            shape = tuple(flat.shape)
            plan = functools.partial(self.overlapped.plan, tensors, variables)
            checksum = _checksum(name, flat, shape)
            same = self._verifier.sum_in_place(checksum, buffer, plan)
        if not same:
            raise self._mismatch(name, flat, shape)
        return unflatten(flat, tensors)

    def reduce_scatter_weighted(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        weight: float | None,
        shards: Sequence[FlatShards],
    ) -> list[torch.Tensor]:
        """Return this worker's shards of the sums of the workers' weighted tensors.

        Each worker sends the others their shards and adds up what it receives, half the
        traffic of an all-reduce. gloo's `reduce_scatter` sends as much as that.

        Args:
            name: What they are for.
            tensors: Tensors of one dtype and device.
            weight: See `Replica.weighted_sum`.
            shards: For each tensor, the elements of each worker.
        """
        shape = (sum([tensor.numel() for tensor in tensors]),)
        self._verify(f"{name} (shares)", tensors[0], shape)
        pairs = [(t.reshape(-1), spec) for t, spec in zip(tensors, shards, strict=True)]
        results: list[torch.Tensor] = []
        for group in split_by_bytes(pairs, lambda pair: pair[0], MAX_BUCKET_BYTES):
            bounds = [[spec.bounds[r] for _, spec in group] for r in range(self.size)]
            sizes = [[end - begin for begin, end in of_rank] for of_rank in bounds]
            sent = torch.cat(
                [
                    tensor[begin:end]
                    for of_rank in bounds
                    for (tensor, _), (begin, end) in zip(group, of_rank, strict=True)
                ]
            )
            scale_in_place(sent, weight)
            local = sizes[self.rank]
            received = sent.new_empty(self.size * sum(local))
            with self.track_operation(name):
                dist.all_to_all_single(
                    received, sent, [sum(local)] * self.size, list(map(sum, sizes))
                )
            sums = received.view(self.size, sum(local)).sum(0).split(local)
            for shard, (_, spec) in zip(sums, group, strict=True):
                results.append(shard.view(spec.shape_of(self.rank)))
        return results

    def sum_all(self, name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return map_flattened(tensors, lambda flat: self.sum(name, flat))

    def gather(
        self, name: str, tensor: torch.Tensor, axis: int
    ) -> tuple[torch.Tensor, list[int]]:
        axis %= max(tensor.ndim, 1)
        tensor = tensor.detach()
        others = tuple(tensor.shape[:axis]) + tuple(tensor.shape[axis + 1 :])
        self._verify(name, tensor, others, f" other than axis {axis}")
        size = torch.tensor([tensor.shape[axis]], device=tensor.device)
        sizes = [torch.empty_like(size) for _ in range(self.size)]
        with self.track_operation(name):
            dist.all_gather(sizes, size)
        counts = [int(s) for s in sizes]
        # Move the axis to the front: what is sent is padded to the longest.
        rows = tensor.movedim(axis, 0)
        is_bool = rows.dtype == torch.bool
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        if is_bool:
            padded = padded.to(torch.uint8)
        received = [torch.empty_like(padded) for _ in range(self.size)]
        with self.track_operation(name):
            dist.all_gather(received, padded)
        pairs = zip(received, counts, strict=True)
        joined = torch.cat([part[:count] for part, count in pairs])
        if is_bool:
            joined = joined.to(torch.bool)
        return joined.movedim(0, axis), counts

    def all_gather_flat(
        self, name: str, tensor: torch.Tensor, sizes: Sequence[int]
    ) -> torch.Tensor:
        """Join the workers' flat tensors, whose sizes all workers know.

        It verifies nothing: the operation before has shown that all workers are here.

        Args:
            name: What it is for.
            tensor: This worker's.
            sizes: Each worker's number of elements, by rank.
        """
        longest = max(sizes)
        sent = tensor
        if len(sent) < longest:
            sent = tensor.new_zeros(longest)
            sent[: len(tensor)] = tensor
        received = sent.new_empty(longest * self.size)
        with self.track_operation(name):
            dist.all_gather_into_tensor(received, sent)
        parts = zip(received.split(longest), sizes, strict=True)
        return torch.cat([part[:size] for part, size in parts])

    def broadcast(
        self, name: str, tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        results = []
        for tensor in tensors:
            self._verify(name, tensor, tuple(tensor.shape))
            sent = tensor.detach().clone(memory_format=torch.contiguous_format)
            if tensor.dtype == torch.bool:
                sent = sent.to(torch.uint8)
            with self.track_operation(name):
                dist.broadcast(sent, src=0)
            results.append(sent.to(tensor.dtype))
        return results

    def _verify(
        self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], which: str = ""
    ) -> None:
        checksum = _checksum(name, tensor, shape)
        with self.track_operation(name):
            same = self._verifier.verify(checksum, tensor.device)
        if not same:
            raise self._mismatch(name, tensor, shape, which)

    def _mismatch(
        self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], which: str = ""
    ) -> Exception:
        return self.mismatch_error(name, [list(shape), str(tensor.dtype)], which)


def _start_all_reduce(tensor: torch.Tensor) -> Any:
    return dist.all_reduce(tensor, async_op=True)


def _checksum(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> bytes:
    return call_checksum(operation_kind(name), shape, tensor.dtype)


def map_flattened(
    tensors: Sequence[torch.Tensor], fn: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """Apply an elementwise function to the flat join of all tensors of a dtype."""
    results: list[Any] = [None] * len(tensors)
    by_kind: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(index)
    for indices in by_kind.values():
        group = [tensors[index] for index in indices]
        flat = fn(torch.cat([tensor.reshape(-1) for tensor in group]))
        parts = flat.split([tensor.numel() for tensor in group])
        for index, tensor, part in zip(indices, group, parts, strict=True):
            results[index] = part.view(tensor.shape)
    return results


_connected: TorchWorkers | None = None


def connect(cluster: Cluster) -> TorchWorkers:
    """Connect this process with the others of a cluster, once."""
    global _connected
    if _connected is None:
        connection.connect(cluster)
        _connected = TorchWorkers(cluster)
    return _connected
