"""How the processes of a cluster find each other, by `torch.distributed`."""

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
    """Connects this process with the others of a cluster, once.

    Raises:
        RuntimeError: If it belongs to others.
        ValueError: If the devices cannot communicate as they were told to.
    """
    if not dist.is_initialized():
        _initialize(cluster)
    if (dist.get_rank(), dist.get_world_size()) != (cluster.rank, cluster.size):
        raise RuntimeError(
            "torch.distributed was initialized for another cluster: it has rank "
            f"{dist.get_rank()} of {dist.get_world_size()}, and the cluster "
            f"resolver says rank {cluster.rank} of {cluster.size}. Leave it to the "
            "strategy, or initialize it for the same workers."
        )


def _initialize(cluster: Cluster) -> None:
    timeout = datetime.timedelta(seconds=cluster.client.timeout_seconds + 60)
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
    cluster.client.on_leave(_destroy)


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


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
