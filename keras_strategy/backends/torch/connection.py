"""torch.distributed's connection of this process with the other workers."""

import datetime
import os
import socket
import sys

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from keras_strategy.backends.torch.collectives import TorchWorkers
from keras_strategy.cluster.membership import Cluster
from keras_strategy.options import CommunicationImplementation

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
