"""TensorFlow's devices, and its server, which connects this process to other workers.

Native tf.distribute starts its server with its first multi-worker strategy, together
with a coordination service. The time limits and the exit barrier of that service would
compete with those of `keras_strategy.cluster`. So the server is started here without
it, by the functions that the native strategy calls.
"""

import logging
import os

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python.eager import context

from keras_strategy.cluster.membership import Cluster

logger = logging.getLogger("keras_strategy")

# All workers get the same job, whatever the cluster resolver calls them: TensorFlow
# then sorts them by rank, and the chief is task 0.
JOB = "worker"


def worker_device(rank: int) -> str:
    return f"/job:{JOB}/replica:0/task:{rank}"


def start(cluster: Cluster) -> list[str]:
    """Start TensorFlow's server, and return the servers' addresses by rank."""
    runtime = context.context()
    if runtime._context_handle is not None:
        raise RuntimeError(
            "TensorFlow has already initialized its devices, so a strategy of several "
            "workers can no longer use them. Create MultiWorkerMirroredStrategy at "
            "the start of the program, before you create a tensor, a variable, a "
            "dataset or another strategy."
        )
    listener, own = cluster.listen_at_own_address()
    with listener:
        addresses = cluster.exchange_addresses("TensorFlow", own)
    leader, task = worker_device(0), f"/job:{JOB}/task:{cluster.rank}"
    runtime.configure_collective_ops(
        collective_leader=leader,
        scoped_allocator_enabled_ops=("CollectiveReduce",),
        device_filters=(task,),
    )
    # Once one is configured, the native strategy does not request another.
    runtime.configure_coordination_service(service_type="")
    server = tensorflow_server_pb2.ServerDef(
        cluster=tf.train.ClusterSpec({JOB: addresses}).as_cluster_def(),
        default_session_config=runtime.config,
        job_name=JOB,
        task_index=cluster.rank,
        protocol="grpc",
    )
    settings = server.default_session_config
    settings.experimental.collective_group_leader = leader
    # The filter keeps everything but collectives on this worker.
    del settings.device_filters[:]
    settings.device_filters.append(task)
    # A proxy in the environment is meant for hosts outside the cluster.
    hosts = [address.rpartition(":")[0] for address in addresses]
    os.environ.setdefault("no_grpc_proxy", ",".join(hosts))
    runtime.enable_collective_ops(server)
    try:
        runtime.ensure_initialized()
    except tf.errors.OpError as error:
        raise RuntimeError(
            f"TensorFlow cannot start its server at {addresses[cluster.rank]}. The "
            "port must be free, and the host must be this machine."
        ) from error
    if cluster.is_chief:
        logger.warning(
            "TensorFlow's worker servers listen on all interfaces; TensorFlow has no "
            "setting for this. Anyone who can reach a port can read and write files "
            "as this user: block these ports from other hosts (see 'Threat model' in "
            "the documentation)."
        )
    return addresses


def native_name(device: str) -> str:
    """Return TensorFlow's name of a device, such as `/device:CPU:0`."""
    kind, index = device.split(":")
    return f"/device:{kind.upper()}:{index}"
