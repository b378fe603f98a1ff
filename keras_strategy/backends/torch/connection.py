"""Connection of a cluster's processes by `torch.distributed`."""

import datetime
import os
import socket
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from keras_strategy.cluster.membership import Cluster
from keras_strategy.options import CommunicationImplementation

_STORE = "address of torch's store"


def connect(cluster: Cluster) -> None:
    """Connect this process with the others of a cluster, once.

    Raises:
        RuntimeError: If torch.distributed was initialized for another cluster.
        ValueError: If the devices do not support the communication options.
    """
    if not dist.is_initialized():
        _initialize(cluster)
    if (dist.get_rank(), dist.get_world_size()) != (cluster.rank, cluster.size):
        raise RuntimeError(
            "torch.distributed was initialized for another cluster: it has rank "
            f"{dist.get_rank()} of {dist.get_world_size()}, but the cluster "
            f"resolver returns rank {cluster.rank} of {cluster.size}. Let the strategy "
            "initialize it, or initialize it for the same workers."
        )


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
    cluster.client.on_leave(_destroy_process_group)


def _store(cluster: Cluster, timeout: datetime.timedelta) -> TCPStore:
    arguments: dict[str, Any] = {"wait_for_workers": False, "timeout": timeout}
    if cluster.is_chief:
        listener = socket.create_server(
            ("127.0.0.1" if cluster.is_local else "", 0), backlog=cluster.size + 16
        )
        port = listener.getsockname()[1]
        cluster.exchange(_STORE, port)
        return TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            master_listen_fd=listener.detach(),
            **arguments,
        )
    port = int(cluster.exchange(_STORE, None)[0])
    host = "127.0.0.1"  # where the chief listens when all workers are local
    if not cluster.is_local:
        host = cluster.addresses[0].rpartition(":")[0].strip("[]")
    return TCPStore(host, port, is_master=False, **arguments)


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
