"""The processes of a cluster, as torch.distributed connects them."""

import datetime
import hashlib
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from keras_strategy.backends.torch.announcing import DIGEST_BYTES, Announcements
from keras_strategy.options.communication import CommunicationImplementation
from keras_strategy.workers.cluster import Cluster
from keras_strategy.workers.member import Waiting

_STORE = "address of torch's store"


class TorchWorkers:
    """Collectives between processes, one call at a time.

    Before values travel the workers compare what they are about to do: torch would
    hang or end the process where they differ.

    Args:
        cluster: The workers.
    """

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self.rank, self.size = cluster.rank, cluster.size
        self._announcements = Announcements(
            self.size, lambda tensor, op: dist.all_reduce(tensor, op=op)
        )
        if not dist.is_initialized():
            _initialize(cluster)
        if (dist.get_rank(), dist.get_world_size()) != (self.rank, self.size):
            raise RuntimeError(
                "torch.distributed was initialized for another cluster: it has rank "
                f"{dist.get_rank()} of {dist.get_world_size()}, and the cluster "
                f"resolver says rank {self.rank} of {self.size}. Leave it to the "
                "strategy, or initialize it for the same workers."
            )

    def sum(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of the workers' tensors.

        Args:
            name: What the sum is for.
            tensor: A tensor of the same shape and dtype on all workers.

        Returns:
            A new tensor.

        Raises:
            ValueError: If the shapes or dtypes differ.
        """
        tensor = tensor.detach()
        shape = tuple(tensor.shape)
        if tensor.dtype == torch.bool:
            self._require_same(name, tensor, shape)
            raise TypeError(f"`{name}` adds numbers. Received a tensor of booleans.")
        digest = _digest(name, tensor, shape)
        with self._waiting(name):
            total = self._announcements.sum(digest, tensor.reshape(-1))
        if total is None:
            raise self._difference(name, tensor, shape)
        return total.view(shape)

    def sum_all(self, name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The sums of several tensors, which travel together."""
        return in_one_piece(tensors, lambda flat: self.sum(name, flat))

    def gather(
        self, name: str, tensor: torch.Tensor, axis: int
    ) -> tuple[torch.Tensor, list[int]]:
        """The workers' tensors, joined in the order of their ranks.

        Args:
            name: What it is for.
            tensor: A tensor whose sizes along `axis` may differ between workers.
            axis: Along which they are joined.

        Returns:
            The joined tensor, and each worker's size along `axis`.

        Raises:
            ValueError: If other sizes, or the dtypes, differ.
        """
        axis %= max(tensor.ndim, 1)
        tensor = tensor.detach()
        others = tuple(tensor.shape[:axis]) + tuple(tensor.shape[axis + 1 :])
        self._require_same(name, tensor, others, f" other than axis {axis}")
        size = torch.tensor([tensor.shape[axis]], device=tensor.device)
        sizes = [torch.empty_like(size) for _ in range(self.size)]
        with self._waiting(name):
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
        with self._waiting(name):
            dist.all_gather(parts, padded)
        pieces = zip(parts, counts, strict=True)
        joined = torch.cat([part[:count] for part, count in pieces])
        if boolean:
            joined = joined.to(torch.bool)
        return joined.movedim(0, axis), counts

    def have_same(self, name: str, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether tensors are the same on all workers, to the last bit.

        Args:
            name: What they are.
            tensors: This worker's.
        """
        digest = hashlib.blake2b(digest_size=16)
        for tensor in tensors:
            digest.update(f"{tuple(tensor.shape)}|{tensor.dtype}|".encode())
            host = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(host.view(torch.uint8).numpy().data)
        return len(set(self.cluster.agree(name, digest.hexdigest()))) == 1

    def broadcast(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrites tensors with the chief's.

        Args:
            name: What it is for.
            tensors: Tensors of the same shapes and dtypes on all workers.

        Raises:
            ValueError: If the shapes or dtypes differ.
        """
        for tensor in tensors:
            self._require_same(name, tensor, tuple(tensor.shape))
            data = tensor.detach()
            sent = data.to(torch.uint8) if data.dtype == torch.bool else data
            sent = sent.contiguous()
            with self._waiting(name):
                dist.broadcast(sent, src=0)
            if sent is not data:
                data.copy_(sent)

    def _require_same(
        self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], which: str = ""
    ) -> None:
        digest = _digest(name, tensor, shape)
        with self._waiting(name):
            same = self._announcements.compare(digest, tensor.device)
        if not same:
            raise self._difference(name, tensor, shape, which)

    def _difference(
        self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], which: str = ""
    ) -> Exception:
        """Asks all workers what they are about to do, which is not the same."""
        kind = _kind(name)
        told = self.cluster.agree(
            "the comparison of what is sent", [kind, list(shape), str(tensor.dtype)]
        )
        pairs = list(zip(self.cluster.names, told, strict=True))
        if len({operation for _, (operation, _, _) in pairs}) > 1:
            listed = ", ".join(f"{who}: {operation}" for who, (operation, *_) in pairs)
            return RuntimeError(
                "All workers must make the same calls in the same order. They are in "
                f"different ones ({listed})."
            )
        listed = ", ".join(
            f"{who}: {tuple(dims)} {dtype}" for who, (_, dims, dtype) in pairs
        )
        return ValueError(
            f"`{name}` needs values whose dtypes and sizes{which} are the same on "
            f"every worker. Received: {listed}."
        )

    def _waiting(self, name: str) -> Waiting:
        return self.cluster.member.waiting(name)


def _kind(name: str) -> str:
    """What an operation is; names of variables count what a process has made before."""
    return name.partition(" '")[0]


def _digest(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> bytes:
    layout = f"{_kind(name)}|{shape}|{tensor.dtype}"
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


def _initialize(cluster: Cluster) -> None:
    timeout = datetime.timedelta(seconds=cluster.member.timeout_seconds + 60)
    implementation = cluster.options.implementation
    gpus = torch.cuda.is_available()
    if implementation is CommunicationImplementation.NCCL and not gpus:
        raise ValueError(
            "CommunicationImplementation.NCCL needs GPUs, and torch sees none. Use "
            "AUTO or RING."
        )
    nccl = gpus and implementation is not CommunicationImplementation.RING
    if cluster.is_local:
        # Otherwise gloo listens on the interface that the host's name stands for.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    excepthook = sys.excepthook
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if nccl else "gloo",
        store=_store(cluster, timeout),
        rank=cluster.rank,
        world_size=cluster.size,
        timeout=timeout,
    )
    # torch's own holds back what others write about an exception until they return,
    # and ours ends the process.
    sys.excepthook = excepthook
    # torch aborts the process where its threads outlive it.
    cluster.member.at_leave(_destroy)


def _store(cluster: Cluster, timeout: datetime.timedelta) -> TCPStore:
    arguments: dict[str, Any] = {"wait_for_workers": False, "timeout": timeout}
    if cluster.is_chief:
        listener = socket.create_server(
            ("127.0.0.1" if cluster.is_local else "", 0), backlog=cluster.size + 16
        )
        port = listener.getsockname()[1]
        cluster.member.publish(_STORE, port)
        return TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            master_listen_fd=listener.detach(),
            **arguments,
        )
    port = int(cluster.member.lookup(_STORE))
    host = cluster.addresses[0].rpartition(":")[0].strip("[]")
    return TCPStore(host, port, is_master=False, **arguments)


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


_connected: TorchWorkers | None = None


def connect(cluster: Cluster) -> TorchWorkers:
    """Connects this process with the others of a cluster, once."""
    global _connected
    if _connected is None:
        _connected = TorchWorkers(cluster)
    return _connected
