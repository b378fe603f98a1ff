"""Collectives between the processes of a cluster, by torch.distributed."""

import datetime
import functools
import math
import os
import sys
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from keras_strategy.backends.torch.collective_check import CollectiveVerifier
from keras_strategy.backends.torch.gradient_buckets import (
    FIRST_BUCKET_BYTES,
    MAX_BUCKET_BYTES,
    FlatBufferPool,
    GradientBuckets,
    bucket_by_size,
    scale_in_place,
    unflatten,
    write_weighted,
)
from keras_strategy.cluster.membership import Cluster
from keras_strategy.cluster.network import find_interfaces
from keras_strategy.cluster_resolver.cluster_spec import join_host_port, split_host_port
from keras_strategy.core.collectives import (
    CHECKSUM_TAIL,
    WorkerCollectives,
    call_checksum,
    check_nccl,
    operation_kind,
)
from keras_strategy.keras_patches.internals import stored_value
from keras_strategy.options import CommunicationImplementation
from keras_strategy.training.reduction import find_subtrees, sum_in_tree
from keras_strategy.training.sharding import FlatShards

# Before torch 2.13 it has the second name.
_ALL_GATHER = (
    "all_gather_single"
    if hasattr(dist, "all_gather_single")
    else "all_gather_into_tensor"
)
# Elements from which each worker adds up a part of a tensor, rather than all of it.
_MIN_SCATTERED = 1 << 14
# Most numbers of all workers that the chief passes on, such as those of the logs.
_MAX_BY_CHIEF = 1 << 10
# Most sets of variables whose gradients are sent early, as each adds hooks to them.
_MAX_LAYOUTS = 16


class TorchWorkers(WorkerCollectives):
    """Collectives that are verified before or while they run."""

    replica: Any = None  # the running one

    def __init__(self, cluster: Cluster):
        super().__init__(cluster)
        # The most bytes of a bucket, for any workers and steps; 0 for the best value,
        # in Keras's own `train_step`. The user's step may change a gradient by its
        # `data`, which torch does not notice.
        self._bucket_bytes = cluster.options.bytes_per_pack
        # Looked up in each call, since `tests.speed.counts_torch` replaces it.
        all_reduce = lambda *args, **kwargs: dist.all_reduce(*args, **kwargs)  # noqa: E731
        self.verifier = CollectiveVerifier(self.size, all_reduce)
        # Workers on the CPUs of one machine would use the cores that compute.
        self._overlaps_on_cpus = bool(self._bucket_bytes) or not cluster.is_local
        # Of sums of several buckets, by their checksums, while their variables exist.
        self._gradients: MutableMapping[bytes, GradientBuckets] = (
            weakref.WeakValueDictionary()
        )

    def sum(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        shape = tuple(tensor.shape)
        if tensor.dtype == torch.bool:
            self.verify(name, tensor, shape)
            raise TypeError(f"`{name}` adds numbers. Received a tensor of booleans.")
        buffer = tensor.new_empty(tensor.numel() + CHECKSUM_TAIL)
        total = buffer[:-CHECKSUM_TAIL].copy_(tensor.reshape(-1))
        with self.track_operation(name):
            # The number says which sum follows, also where layers repeat.
            if self.replica is not None and self.replica.sums < 512:
                self.replica.sums += 1
                name = f"{name} {self.replica.sums}"
            same = self.verifier.sum_in_place(
                _checksum(name, tensor, shape), buffer, [tensor.numel()]
            )
        if not same:
            raise self._mismatch(name, tensor, shape)
        return total.view(shape)

    def can_overlap(self, device: torch.device | str) -> bool:
        """Return True if tensors are sent while the device computes."""
        return self._overlaps_on_cpus or torch.device(device).type == "cuda"

    def assign_buckets(
        self, gradients: Sequence[torch.Tensor], variables: Sequence[Any] | None
    ) -> list[list[int]]:
        """Return the indices of each bucket's gradients, in sending order."""
        # The list is empty if one bucket has all of them, in their order.
        max_bytes = self._bucket_bytes
        if not max_bytes and self.can_overlap(gradients[0].device):
            max_bytes = MAX_BUCKET_BYTES if self.replica.step.logs_are_metrics else 0
        if not max_bytes or variables is None or len(variables) != len(gradients):
            return []
        first_bytes = min(FIRST_BUCKET_BYTES, max_bytes)
        buckets = bucket_by_size(gradients, first_bytes, max_bytes)[::-1]
        return buckets if len(buckets) > 1 else []

    def all_reduce_weighted(
        self,
        tensors: Sequence[torch.Tensor],
        weight: float | None,
        buffers: FlatBufferPool,
        variables: Sequence[Any] | None,
    ) -> list[torch.Tensor]:
        """Sum the workers' weighted tensors: the gradients of variables if given."""
        buckets = self.assign_buckets(tensors, variables)
        name = self.replica.step.reduction
        parts = [[tensors[index] for index in b] for b in buckets] or [tensors]
        sizes = [sum(map(torch.numel, part)) for part in parts]
        checksum = _checksum(name, tensors[0], tuple(sizes))
        early = self._gradients.get(checksum)
        buffer = None if early is None else early.end(tensors, weight)
        keeps_sent = buffer is not None or self.verifier.sent == 0
        if buffer is None:
            buffer = buffers.take(sum(sizes) + CHECKSUM_TAIL, tensors[0])
        flat = buffer[:-CHECKSUM_TAIL]

        def fill(bucket, values):
            write_weighted(values, parts[bucket], weight)

        if not buckets:  # then nothing is sent early
            write_weighted(flat, tensors, weight)
        with self.track_operation(name):
            same = self.verifier.sum_in_place(
                checksum, buffer, sizes, fill if buckets else None, keeps_sent
            )
        if not same:
            raise self._mismatch(name, tensors[0], tuple(sizes))
        if not buckets:
            return unflatten(flat, tensors)
        assert variables is not None
        parameters = [stored_value(variable) for variable in variables]
        pairs = zip(parameters, tensors, strict=True)
        has_room = len(self._gradients) < _MAX_LAYOUTS
        if (
            early is None
            and has_room
            and all(p is not None and p.is_leaf and p.grad is g for p, g in pairs)
        ):
            early = GradientBuckets(self, checksum, parameters, buckets)
            self._gradients[checksum] = early
        order = [index for bucket in buckets for index in bucket]
        views = unflatten(flat, [tensors[index] for index in order])
        sums = dict(zip(order, views, strict=True))
        return [sums[index] for index in range(len(tensors))]

    def reduce_scatter_weighted(
        self,
        tensors: list[Any],
        weight: float | None,
        shards: Sequence[FlatShards],
        buffers: FlatBufferPool | None = None,
    ) -> list[torch.Tensor]:
        """Return this worker's shards of the sums of the workers' weighted tensors."""
        # The list loses the tensors that were sent, so that their memory can be freed.
        # Each worker sends the others their shards and adds up what it receives, half
        # the traffic of an all-reduce. gloo's `reduce_scatter` sends as much as that.
        shape = (sum([tensor.numel() for tensor in tensors]),)
        name = self.replica.step.reduction
        self.verify(f"{name} (shares)", tensors[0], shape)
        results: list[torch.Tensor] = []
        for bucket in bucket_by_size(tensors, MAX_BUCKET_BYTES):
            flats = [tensors[index].reshape(-1) for index in bucket]
            specs = [shards[index] for index in bucket]
            bounds = [[s.bounds[r] for s in specs] for r in range(self.size)]
            sizes = [[end - begin for begin, end in of_rank] for of_rank in bounds]
            totals = list(map(sum, sizes))
            sent = (buffers or _NEW).take(sum(totals), flats[0])
            parts = [
                flat[begin:end]
                for of_rank in bounds
                for flat, (begin, end) in zip(flats, of_rank, strict=True)
            ]
            torch.cat(parts, out=sent)
            del flats, parts
            for index in bucket:
                tensors[index] = None
            scale_in_place(sent, weight)
            sums = self._sum_parts(name, sent, totals).split(sizes[self.rank])
            for shard, spec in zip(sums, specs, strict=True):
                results.append(shard.view(spec.shape_of(self.rank)))
        return results

    def _sum_parts(
        self, name: str, sent: torch.Tensor, sizes: Sequence[int]
    ) -> torch.Tensor:
        """Send each worker its part of a flat tensor; sum those that have come."""
        local = sizes[self.rank]
        received = sent.new_empty(self.size * local)
        with self.track_operation(name):
            dist.all_to_all_single(received, sent, [local] * self.size, list(sizes))
        return received.view(self.size, local).sum(0)

    def sum_shards(self, name: str, groups: Sequence[dict[int, torch.Tensor]]) -> None:
        """Sum the workers' shards by replica; leave each worker its replicas'."""
        replicas = len(groups[0]) // self.size  # of each worker
        by_worker = [
            [
                group[worker * replicas + local]
                for group in groups
                for local in range(replicas)
            ]
            for worker in range(self.size)
        ]
        sizes = [sum([part.numel() for part in parts]) for parts in by_worker]
        home = by_worker[0][0]
        self.verify(f"{name} (shares)", home, (sum(sizes),))
        sent = torch.cat(
            [p.reshape(-1).to(home.device) for ps in by_worker for p in ps]
        )
        sums = self._sum_parts(name, sent, sizes)
        own = by_worker[self.rank]
        for total, part in zip(sums.split([p.numel() for p in own]), own, strict=True):
            part.copy_(total.view(part.shape))

    def sum_in_tree(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        buffers: FlatBufferPool | None = None,
    ) -> torch.Tensor:
        """Sum the tensors of all workers' replicas, in the order of one binary tree."""
        first, count = tensors[0], len(tensors)
        if first.dtype == torch.bool:
            raise TypeError(f"`{name}` adds numbers. Received a tensor of booleans.")
        every = range(count * self.size)
        replicas = [range(i, i + count) for i in range(0, len(every), count)]
        subtrees = [find_subtrees(of_worker, every) for of_worker in replicas]
        leaves = {
            range(replica, replica + 1): tensor.detach().reshape(-1)
            for replica, tensor in zip(replicas[self.rank], tensors, strict=True)
        }
        sums = [sum_in_tree(s, leaves, torch.add) for s in subtrees[self.rank]]
        self.verify(f"{name} (in a tree)", first, tuple(first.shape))
        nodes = [subtree for of_worker in subtrees for subtree in of_worker]
        counts = list(map(len, subtrees))

        def total(parts):
            return sum_in_tree(every, dict(zip(nodes, parts, strict=True)), torch.add)

        if first.numel() < _MIN_SCATTERED:
            rows = self.gather_rows(name, torch.stack(sums), counts)
            return total(rows.unbind()).view(first.shape)
        # Each worker adds up a part, which the others send it, and sends the result.
        buffers = buffers or _NEW
        sizes = [part.numel() for part in first.reshape(-1).tensor_split(self.size)]
        sent = sums[0]
        if len(sums) > 1:
            pieces = [flat.split(sizes) for flat in sums]
            by_worker = zip(*pieces, strict=True)
            sent = torch.cat([piece for group in by_worker for piece in group])
        local = sizes[self.rank]
        received = buffers.take(len(nodes) * local, first)
        with self.track_operation(name):
            dist.all_to_all_single(
                received.view(torch.uint8),
                sent.view(torch.uint8),
                [n * local * first.element_size() for n in counts],
                [len(sums) * size * first.element_size() for size in sizes],
            )
        part = total(received.view(len(nodes), local).unbind())
        return self.start_gather(name, part, sizes, buffers)().view(first.shape)

    def sum_all(self, name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        def sum_flat(flat: torch.Tensor) -> torch.Tensor:
            is_number = flat.dtype != torch.bool and not flat.is_complex()
            is_short = self.size * flat.numel() <= _MAX_BY_CHIEF
            if is_number and is_short and flat.device.type == "cpu":
                return self._sum_by_chief(name, flat)
            return self.sum(name, flat)

        return map_flattened(sum_flat, tensors)

    def _sum_by_chief(self, name: str, flat: torch.Tensor) -> torch.Tensor:
        """Sum few numbers in two messages by way of the chief, instead of a ring."""
        values = self.cluster.exchange(name, [str(flat.dtype), flat.tolist()])
        if len({(dtype, len(numbers)) for dtype, numbers in values}) > 1:
            raise self._mismatch(name, flat, tuple(flat.shape))
        return functools.reduce(
            torch.add, [flat.new_tensor(numbers) for _, numbers in values]
        )

    def gather(
        self,
        name: str,
        tensor: torch.Tensor,
        axis: int,
        counts: Sequence[int] | None = None,
    ) -> tuple[torch.Tensor, list[int]]:
        axis %= max(tensor.ndim, 1)
        tensor = tensor.detach()
        others = tuple(tensor.shape[:axis]) + tuple(tensor.shape[axis + 1 :])
        self.verify(name, tensor, others, f" other than axis {axis}")
        rows = tensor.movedim(axis, 0)
        if counts is None:  # not all workers know them
            size = torch.tensor([len(rows)], device=tensor.device)
            counts = self.gather_rows(name, size, [1] * self.size).tolist()
        return self.gather_rows(name, rows, counts).movedim(0, axis), list(counts)

    def gather_rows(
        self, name: str, rows: torch.Tensor, counts: Sequence[int]
    ) -> torch.Tensor:
        """Join the workers' rows, whose numbers all workers know; verify nothing."""
        return self.start_gather(name, rows, counts)()

    def start_gather(
        self,
        name: str,
        rows: torch.Tensor,
        counts: Sequence[int],
        buffers: FlatBufferPool | None = None,
    ) -> Callable[[], torch.Tensor]:
        """Start to join the workers' rows; return what waits for them."""
        shape = sum(counts), *rows.shape[1:]
        if not math.prod(shape):
            return lambda: rows.new_empty(shape)
        rows = rows.detach()
        start = self._start_padded_gather if rows.is_cuda else self._start_exchange
        works, join = start(rows, counts, buffers or _NEW)

        def finish() -> torch.Tensor:
            with self.track_operation(name):
                for work in works:
                    work.wait()
            return join().view(shape)

        return finish

    def _start_exchange(
        self, rows: torch.Tensor, counts: Sequence[int], buffers: FlatBufferPool
    ) -> tuple[list[Any], Callable[[], torch.Tensor]]:
        """Start to send these rows to each other worker, and to receive theirs."""
        # gloo's all-gather takes twice as long, and as much memory again.
        width = math.prod(rows.shape[1:])
        joined = buffers.take(sum(counts) * width, rows)
        parts = joined.split([count * width for count in counts])
        parts[self.rank].copy_(rows.reshape(-1))
        works = []
        for rank, part in enumerate(parts):
            if rank != self.rank:
                works.append(dist.isend(parts[self.rank], rank))
                works.append(dist.irecv(part, rank))
        return works, lambda: joined

    def _start_padded_gather(
        self, rows: torch.Tensor, counts: Sequence[int], buffers: FlatBufferPool
    ) -> tuple[list[Any], Callable[[], torch.Tensor]]:
        """Start an all-gather, where each worker sends as many rows as the longest."""
        longest = max(counts)
        sent = rows.contiguous()
        if len(rows) < longest:
            sent = rows.new_zeros((longest, *rows.shape[1:]))
            sent[: len(rows)] = rows
        received = buffers.take(self.size * sent.numel(), rows)
        by_row = received.view(self.size * longest, -1)
        # As bytes, since gloo does not know all dtypes.
        sent = sent.reshape(longest, -1).view(torch.uint8)
        gather = getattr(dist, _ALL_GATHER)
        work = gather(by_row.view(torch.uint8), sent, async_op=True)

        def join() -> torch.Tensor:
            short = [count for count in counts if count < longest]
            if not any(short[1:]) and sorted(counts, reverse=True) == list(counts):
                return by_row[: sum(counts)]  # in one piece
            parts = zip(by_row.split(longest), counts, strict=True)
            return torch.cat([part[:count] for part, count in parts])

        return [work], join

    def broadcast(
        self, name: str, tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        results = []
        for tensor in tensors:
            self.verify(name, tensor, tuple(tensor.shape))
            sent = tensor.detach().clone(memory_format=torch.contiguous_format)
            if tensor.dtype == torch.bool:
                sent = sent.to(torch.uint8)
            with self.track_operation(name):
                dist.broadcast(sent, src=0)
            results.append(sent.to(tensor.dtype))
        return results

    def verify(
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
    fn: Callable[..., torch.Tensor], *sequences: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Apply an elementwise function, as `map` does, to the flat joins of a dtype."""
    first = sequences[0]
    results: list[Any] = [None] * len(first)
    by_kind: dict[Any, list[int]] = {}
    for index, tensor in enumerate(first):
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(index)
    for indices in by_kind.values():
        flats = [
            torch.cat([tensors[index].reshape(-1) for index in indices])
            for tensors in sequences
        ]
        parts = unflatten(fn(*flats), [first[index] for index in indices])
        for index, part in zip(indices, parts, strict=True):
            results[index] = part
    return results


# It keeps no buffers.
_NEW = FlatBufferPool(max_buffers=0)
_connected: TorchWorkers | None = None
# Whether `connect` initialized torch.distributed, rather than the program.
_initialized_here = False


def connect(cluster: Cluster) -> TorchWorkers:
    global _connected, _initialized_here
    if _connected is None:
        if not dist.is_initialized():
            _initialize(cluster)
            _initialized_here = True
        if (dist.get_rank(), dist.get_world_size()) != (cluster.rank, cluster.size):
            raise RuntimeError(
                "torch.distributed was initialized for another cluster: it has rank "
                f"{dist.get_rank()} of {dist.get_world_size()}, but the cluster "
                f"resolver returns rank {cluster.rank} of {cluster.size}. Let the "
                "strategy initialize it, or initialize it for the same workers."
            )
        _connected = TorchWorkers(cluster)
        cluster.client.on_leave(_forget)
    return _connected


def _forget() -> None:
    global _connected, _initialized_here
    _connected, _initialized_here = None, False


def initialized_workers() -> TorchWorkers | None:
    """Return the workers if a strategy initialized torch.distributed for them."""
    return _connected if _initialized_here else None


def _initialize(cluster: Cluster) -> None:
    timeout = datetime.timedelta(seconds=cluster.client.timeout_seconds + 60)
    gpus, ring = torch.cuda.is_available(), CommunicationImplementation.RING
    check_nccl(cluster, gpus, "torch")
    nccl = gpus and cluster.options.implementation is not ring
    # By default gloo listens on the interface of the host's name, which may be the
    # loopback or not exist. NCCL's variable has a prefix for whole names.
    interface = find_interfaces().get(cluster.host)
    prefixes = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "="}
    unset = [name for name in prefixes if interface and name not in os.environ]
    os.environ.update({name: f"{prefixes[name]}{interface}" for name in unset})
    excepthook = sys.excepthook
    store = _store(cluster, timeout)
    with cluster.client.track_operation("the connections of torch.distributed"):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if nccl else "gloo",
            store=store,
            rank=cluster.rank,
            world_size=cluster.size,
            timeout=timeout,
        )
    # torch's hook prints the other hooks' output only after they return. Ours ends the
    # process.
    sys.excepthook = excepthook
    # The next cluster may need another interface.
    cluster.client.on_leave(functools.partial(_disconnect, unset))


def _disconnect(variables: Sequence[str]) -> None:
    # torch aborts the process if its threads outlive it.
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in variables:
        os.environ.pop(name, None)


def _store(cluster: Cluster, timeout: datetime.timedelta) -> TCPStore:
    # The chief's is the store's. gloo listens on a port of each worker as well.
    with cluster.listen(backlog=2 * cluster.size + 16) as listener:
        own = join_host_port(cluster.host, listener.getsockname()[1])
        chief = cluster.exchange_addresses("torch.distributed", own)[0]
        host, port = split_host_port(chief)
        with cluster.client.track_operation("the connection to torch's store"):
            return TCPStore(
                host,
                int(port or 0),
                is_master=cluster.is_chief,
                master_listen_fd=listener.detach() if cluster.is_chief else None,
                wait_for_workers=False,
                timeout=timeout,
            )
