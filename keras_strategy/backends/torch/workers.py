"""Collectives between the processes of a cluster, by torch.distributed."""

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from keras_strategy.backends.torch import connection
from keras_strategy.backends.torch.announcing import DIGEST_BYTES, TAIL, Announcements
from keras_strategy.core.workers import Workers, kind_of
from keras_strategy.workers.cluster import Cluster


class TorchWorkers(Workers):
    """See `core.workers.Workers`.

    torch hangs or ends the process where the workers do different things. So what they
    are about to do is compared in the collective that does it: see `announcing`.
    """

    def __init__(self, cluster: Cluster):
        super().__init__(cluster)
        self._announcements = Announcements(
            self.size, lambda tensor, op: dist.all_reduce(tensor, op=op)
        )

    def sum(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        shape = tuple(tensor.shape)
        if tensor.dtype == torch.bool:
            self._require_same(name, tensor, shape)
            raise TypeError(f"`{name}` adds numbers. Received a tensor of booleans.")
        digest = _digest(name, tensor, shape)
        with self.waiting(name):
            total = self._announcements.sum(digest, tensor.reshape(-1))
        if total is None:
            raise self._difference(name, tensor, shape)
        return total.view(shape)

    def sum_in_place(self, name: str, both: torch.Tensor) -> None:
        """Makes a tensor the sum of the workers' tensors.

        Args:
            name: What it is for.
            both: A tensor of one dimension, of which the last `TAIL` elements are room.
        """
        values = both[:-TAIL]
        shape = tuple(values.shape)
        with self.waiting(name):
            same = self._announcements.sum_in_place(_digest(name, values, shape), both)
        if not same:
            raise self._difference(name, values, shape)

    def sum_all(self, name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return in_one_piece(tensors, lambda flat: self.sum(name, flat))

    def gather(
        self, name: str, tensor: torch.Tensor, axis: int
    ) -> tuple[torch.Tensor, list[int]]:
        axis %= max(tensor.ndim, 1)
        tensor = tensor.detach()
        others = tuple(tensor.shape[:axis]) + tuple(tensor.shape[axis + 1 :])
        self._require_same(name, tensor, others, f" other than axis {axis}")
        size = torch.tensor([tensor.shape[axis]], device=tensor.device)
        sizes = [torch.empty_like(size) for _ in range(self.size)]
        with self.waiting(name):
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
        with self.waiting(name):
            dist.all_gather(parts, padded)
        pieces = zip(parts, counts, strict=True)
        joined = torch.cat([part[:count] for part, count in pieces])
        if boolean:
            joined = joined.to(torch.bool)
        return joined.movedim(0, axis), counts

    def broadcast(
        self, name: str, tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        results = []
        for tensor in tensors:
            self._require_same(name, tensor, tuple(tensor.shape))
            sent = tensor.detach().clone(memory_format=torch.contiguous_format)
            if tensor.dtype == torch.bool:
                sent = sent.to(torch.uint8)
            with self.waiting(name):
                dist.broadcast(sent, src=0)
            results.append(sent.to(tensor.dtype))
        return results

    def _require_same(
        self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], which: str = ""
    ) -> None:
        digest = _digest(name, tensor, shape)
        with self.waiting(name):
            same = self._announcements.compare(digest, tensor.device)
        if not same:
            raise self._difference(name, tensor, shape, which)

    def _difference(
        self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], which: str = ""
    ) -> Exception:
        """Asks all workers what they are about to do, which is not the same."""
        told = self.cluster.agree(
            "the comparison of what is sent",
            [kind_of(name), list(shape), str(tensor.dtype)],
        )
        calls = [call for call, *_ in told]
        return self.refusal(name, calls, [layout for _, *layout in told], which)


def _digest(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> bytes:
    return _digest_of(kind_of(name), shape, tensor.dtype)


@functools.lru_cache(maxsize=1024)
def _digest_of(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> bytes:
    layout = f"{kind}|{shape}|{dtype}"
    return hashlib.blake2b(layout.encode(), digest_size=DIGEST_BYTES).digest()


def in_one_piece(
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
