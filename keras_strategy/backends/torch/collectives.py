"""Collectives between the processes of a cluster, by torch.distributed."""

import datetime
import functools
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from keras_strategy.backends.torch.collective_check import (
    CollectiveVerifier,
    scale_in_place,
)
from keras_strategy.backends.torch.gradient_buckets import (
    FIRST_BUCKET_BYTES,
    MAX_BUCKET_BYTES,
    FlatBufferPool,
    GradientBuckets,
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
from keras_strategy.keras_patches.variables_optimizers import stored_value
from keras_strategy.options import CommunicationImplementation
from keras_strategy.training.sharding import FlatShards

# The operation that updates variables.
_APPLY = "optimizer.apply"


class TorchWorkers(WorkerCollectives):
    """Collectives that are verified before or while they run."""

    replica: Any = None  # the running one

    def __init__(self, cluster: Cluster):
        super().__init__(cluster)
        # The most bytes of a bucket, for any workers and steps; 0 for the best value,
        # in Keras's own `train_step`. The user's step may change a gradient by its
        # `data`, which torch does not notice.
        self._bucket_bytes = cluster.options.bytes_per_pack
        self.verifier = CollectiveVerifier(
            self.size,
            # Looked up in each call, since `profiling` replaces it.
            lambda *args, **kwargs: dist.all_reduce(*args, **kwargs),
            self._bucket_bytes or FIRST_BUCKET_BYTES,
        )

    def sum(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        shape = tuple(tensor.shape)
        if tensor.dtype == torch.bool:
            self._verify(name, tensor, shape)
            raise TypeError(f"`{name}` adds numbers. Received a tensor of booleans.")
        buffer = tensor.new_empty(tensor.numel() + CHECKSUM_TAIL)
        total = buffer[:-CHECKSUM_TAIL].copy_(tensor.reshape(-1))
        with self.track_operation(name):
            same = self.verifier.sum_in_place(_checksum(name, tensor, shape), buffer)
        if not same:
            raise self._mismatch(name, tensor, shape)
        return total.view(shape)

    def can_overlap(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Return True if gradients of Keras's own step are sent during backward."""
        # Workers on the CPUs of one machine would use the cores that compute.
        is_local = self.cluster.is_local
        return bool(self._bucket_bytes) or not is_local or gradients[0].is_cuda

    def split_gradients(
        self, gradients: Sequence[torch.Tensor], variables: Sequence[Any] | None
    ) -> GradientBuckets | None:
        """Return the buckets of gradients, or None if they are not to be split."""
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
        return GradientBuckets(self, parameters, buckets) if len(buckets) > 1 else None

    def all_reduce_weighted(
        self,
        tensors: Sequence[torch.Tensor],
        weight: float | None,
        buffers: FlatBufferPool,
        variables: Sequence[Any] | None,
    ) -> list[torch.Tensor]:
        """Sum the workers' weighted tensors: the gradients of variables if given."""
        with self.track_operation(_APPLY):
            if self.verifier.pending is not None:
                pending = cast(GradientBuckets, self.verifier.pending)
                sums = pending.weighted_sums(tensors, weight)
                if sums is not None:
                    return sums
            buffer = buffers.concatenate(tensors)
            flat = buffer[:-CHECKSUM_TAIL]
            scale_in_place(flat, weight)
            shape = tuple(flat.shape)
            same = self.verifier.sum_in_place(
                _checksum(_APPLY, flat, shape),
                buffer,
                functools.partial(self.split_gradients, tensors, variables),
            )
        if not same:
            raise self._mismatch(_APPLY, flat, shape)
        return unflatten(flat, tensors)

    def reduce_scatter_weighted(
        self,
        tensors: Sequence[torch.Tensor],
        weight: float | None,
        shards: Sequence[FlatShards],
    ) -> list[torch.Tensor]:
        """Return this worker's shards of the sums of the workers' weighted tensors.

        Each worker sends the others their shards and adds up what it receives, half the
        traffic of an all-reduce. gloo's `reduce_scatter` sends as much as that.
        """
        shape = (sum([tensor.numel() for tensor in tensors]),)
        self._verify(f"{_APPLY} (shares)", tensors[0], shape)
        results: list[torch.Tensor] = []
        for part in split_by_bytes(tensors, MAX_BUCKET_BYTES):
            flats = [tensor.reshape(-1) for tensor in tensors[part]]
            bounds = [[s.bounds[r] for s in shards[part]] for r in range(self.size)]
            sizes = [[end - begin for begin, end in of_rank] for of_rank in bounds]
            sent = torch.cat(
                [
                    flat[begin:end]
                    for of_rank in bounds
                    for flat, (begin, end) in zip(flats, of_rank, strict=True)
                ]
            )
            scale_in_place(sent, weight)
            local = sizes[self.rank]
            received = sent.new_empty(self.size * sum(local))
            with self.track_operation(_APPLY):
                dist.all_to_all_single(
                    received, sent, [sum(local)] * self.size, list(map(sum, sizes))
                )
            sums = received.view(self.size, sum(local)).sum(0).split(local)
            for shard, spec in zip(sums, shards[part], strict=True):
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
        if rows.dtype == torch.bool:
            rows = rows.to(torch.uint8)
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        received = [torch.empty_like(padded) for _ in range(self.size)]
        with self.track_operation(name):
            dist.all_gather(received, padded)
        pairs = zip(received, counts, strict=True)
        joined = torch.cat([part[:count] for part, count in pairs])
        return joined.to(tensor.dtype).movedim(0, axis), counts

    def gather_updates(
        self, tensor: torch.Tensor, sizes: Sequence[int]
    ) -> torch.Tensor:
        """Join the workers' flat tensors, whose sizes all workers know.

        It verifies nothing: the sum of the gradients has shown that all are here.
        """
        longest = max(sizes)
        sent = tensor
        if len(sent) < longest:
            sent = tensor.new_zeros(longest)
            sent[: len(tensor)] = tensor
        received = sent.new_empty(longest * self.size)
        with self.track_operation(_APPLY):
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
            same = self.verifier.verify(checksum, tensor.device)
        if not same:
            raise self._mismatch(name, tensor, shape, which)

    def _mismatch(
        self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], which: str = ""
    ) -> Exception:
        return self.mismatch_error(name, [list(shape), str(tensor.dtype)], which)


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
        if not dist.is_initialized():
            _initialize(cluster)
        if (dist.get_rank(), dist.get_world_size()) != (cluster.rank, cluster.size):
            raise RuntimeError(
                "torch.distributed was initialized for another cluster: it has rank "
                f"{dist.get_rank()} of {dist.get_world_size()}, but the cluster "
                f"resolver returns rank {cluster.rank} of {cluster.size}. Let the "
                "strategy initialize it, or initialize it for the same workers."
            )
        _connected = TorchWorkers(cluster)
    return _connected


def _initialize(cluster: Cluster) -> None:
    timeout = datetime.timedelta(seconds=cluster.client.timeout_seconds + 60)
    implementation = cluster.options.implementation
    gpus = torch.cuda.is_available()
    if implementation is CommunicationImplementation.NCCL and not gpus:
        raise ValueError(
            "CommunicationImplementation.NCCL needs GPUs, but torch finds none. Use "
            "AUTO or RING."
        )
    nccl = gpus and implementation is not CommunicationImplementation.RING
    if cluster.is_local:
        # By default gloo listens on the interface of the host's name.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    excepthook = sys.excepthook
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if nccl else "gloo",
        store=_store(cluster, timeout),
        rank=cluster.rank,
        world_size=cluster.size,
        timeout=timeout,
    )
    # torch's hook prints the other hooks' output only after they return. Ours ends the
    # process.
    sys.excepthook = excepthook
    # torch aborts the process if its threads outlive it.
    cluster.client.on_leave(_disconnect)


def _store(cluster: Cluster, timeout: datetime.timedelta) -> TCPStore:
    host, listener = "127.0.0.1", None
    if cluster.is_chief:
        address = (host if cluster.is_local else "", 0)
        listener = socket.create_server(address, backlog=cluster.size + 16)
    elif not cluster.is_local:
        host = cluster.addresses[0].rpartition(":")[0].strip("[]")
    port = None if listener is None else listener.getsockname()[1]
    return TCPStore(
        host,
        int(cluster.exchange("address of torch's store", port)[0]),
        is_master=cluster.is_chief,
        master_listen_fd=None if listener is None else listener.detach(),
        wait_for_workers=False,
        timeout=timeout,
    )


def _disconnect() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
