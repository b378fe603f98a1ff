"""This process as one of several that native TensorFlow connects.

Native tf.distribute starts its server when its first strategy for several workers is
made, and with it a coordination service, whose time limits and whose barrier at the end
would compete with those of `keras_strategy.workers`. So it is started here, by the
functions that the native strategy calls, without that service.
"""

import contextlib
import logging
import os
import socket

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python.eager import context

from keras_strategy.workers.cluster import Cluster

logger = logging.getLogger("keras_strategy")

# All workers have the same job, whatever the cluster resolver calls them: TensorFlow
# sorts them by rank then, and the chief is task 0.
JOB = "worker"


def worker_device(rank: int) -> str:
    """TensorFlow's name of a worker, without one of its devices."""
    return f"/job:{JOB}/replica:0/task:{rank}"


def start(cluster: Cluster) -> list[str]:
    """Starts TensorFlow's server in this process.

    Args:
        cluster: The workers.

    Returns:
        The servers' addresses, by rank.

    Raises:
        RuntimeError: If TensorFlow's devices are in use already.
    """
    if context.context()._context_handle is not None:
        raise RuntimeError(
            "TensorFlow has already initialized its devices, which a strategy of "
            "several workers cannot use any more. Make MultiWorkerMirroredStrategy at "
            "the start of the program, before a tensor, a variable, a dataset or "
            "another strategy is made."
        )
    told = cluster.agree("the addresses of TensorFlow's servers", _own_address(cluster))
    addresses = [str(address) for address in told]
    leader, own = worker_device(0), f"/job:{JOB}/task:{cluster.rank}"
    context.context().configure_collective_ops(
        collective_leader=leader,
        scoped_allocator_enabled_ops=("CollectiveReduce",),
        device_filters=(own,),
    )
    # Where one is configured, the native strategy does not ask for another.
    context.context().configure_coordination_service(service_type="")
    server = tensorflow_server_pb2.ServerDef(
        cluster=tf.train.ClusterSpec({JOB: addresses}).as_cluster_def(),
        default_session_config=context.context().config,
        job_name=JOB,
        task_index=cluster.rank,
        protocol="grpc",
    )
    settings = server.default_session_config
    settings.experimental.collective_group_leader = leader
    # The filter keeps everything but collectives on this worker.
    del settings.device_filters[:]
    settings.device_filters.append(own)
    # A proxy that the environment names is for the world outside of the cluster.
    os.environ.setdefault("no_grpc_proxy", ",".join(map(_host, addresses)))
    context.context().enable_collective_ops(server)
    try:
        context.context().ensure_initialized()
    except tf.errors.OpError as error:
        raise RuntimeError(
            f"TensorFlow cannot start its server at {addresses[cluster.rank]}. The "
            "port must be free, and the host be this machine."
        ) from error
    if cluster.is_chief:
        logger.warning(
            "TensorFlow's servers of the workers listen on all interfaces, which has "
            "no setting, and who reaches one can read and write files as its user: "
            "keep their ports from others (see 'Threat model' in the documentation)."
        )
    return addresses


def _own_address(cluster: Cluster) -> str:
    """The worker's address if its port is free, else one on the same host."""
    address = cluster.addresses[cluster.rank] if cluster.addresses else ""
    host = _host(address) or socket.gethostname()
    port = address.rpartition(":")[2]
    # Launchers may use the port themselves, for what they call the master.
    wanted = [int(port)] if port.isdecimal() and int(port) > 0 else []
    for candidate in [*wanted, 0]:
        # Every interface, as TensorFlow's server will do it.
        with contextlib.suppress(OSError), socket.create_server(("", candidate)) as s:
            return f"{host}:{s.getsockname()[1]}"
    raise RuntimeError("There is no free port for TensorFlow's server.")


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def has_seed() -> bool:
    """Whether the process has a seed, which TensorFlow's shuffling goes by."""
    return context.global_seed() is not None


def random_state() -> tuple[int, tuple]:
    """TensorFlow's global seed and how far the seeds drawn from it have come.

    A process without a global seed gets one: its operations would draw their seeds
    from the machine, which no other worker can follow.
    """
    if not has_seed():
        tf.random.set_seed(int.from_bytes(os.urandom(4)))
    return context.global_seed(), context.context()._rng.getstate()


def set_random_state(seed: int, drawn: tuple) -> None:
    """Sets what `random_state` gave."""
    if context.global_seed() != seed:
        tf.random.set_seed(seed)
    context.context()._rng.setstate(drawn)
