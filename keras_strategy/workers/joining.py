"""Joining the cluster that a cluster resolver describes."""

from typing import Any

from keras_strategy.cluster_resolver import roles
from keras_strategy.errors import ClusterError
from keras_strategy.options.communication import CommunicationOptions
from keras_strategy.workers import ending
from keras_strategy.workers.cluster import Cluster
from keras_strategy.workers.exit_codes import EXIT_CLUSTER_NOT_FORMED
from keras_strategy.workers.member import CoordinatorClient
from keras_strategy.workers.settings import all_local, rendezvous_address

_joined: Cluster | None = None


def join_cluster(resolver: Any, options: CommunicationOptions) -> Cluster | None:
    """Join the cluster, once in a process.

    Returns:
        The cluster; None where this process trains alone: without a resolver, as the
        only worker, or as an evaluator.

    Raises:
        ValueError: If this process is one that does not train.
        RuntimeError: If it has joined another cluster, or is a notebook.
    """
    global _joined
    if resolver is None:
        return None
    # First: some resolvers set their task from the spec.
    spec = resolver.cluster_spec()
    task_type, task_id = resolver.task_type, resolver.task_id
    if not spec.jobs:
        return None
    task_type = "worker" if task_type is None else task_type
    task_id = 0 if task_id is None else task_id
    roles.validate_task(spec, task_type, task_id)
    if task_type == "ps":
        raise ValueError(
            "This process is a parameter server (task type 'ps'), which "
            "MultiWorkerMirroredStrategy does not use. Start the training program only "
            "in the tasks 'chief' and 'worker'."
        )
    if roles.worker_count(spec, task_type) == 1:
        return None
    names = tuple(
        job if job == "chief" else f"{job} {index}"
        for job in ("chief", "worker")
        if job in spec.jobs
        for index in spec.task_indices(job)
    )
    addresses = tuple(roles.training_addresses(spec))
    rank = roles.task_rank(spec, task_type, task_id)
    if _joined is not None:
        if (_joined.rank, _joined.addresses) == (rank, addresses):
            return _joined
        raise RuntimeError(
            "This process already belongs to another cluster, as "
            f"'{_joined.names[_joined.rank]}' of {list(_joined.addresses)}. A process "
            "is a worker of one cluster: start another one for "
            f"{list(addresses)}."
        )
    if _in_notebook():
        raise RuntimeError(
            "A notebook cannot be one of several workers, which run the same program "
            "at the same time. Write the program to a file and start it with "
            f"`keras-strategy run --workers {len(names)} train.py`, or use "
            "MirroredStrategy for the devices of this machine."
        )
    try:
        member = CoordinatorClient.join(
            rendezvous_address(addresses),
            rank,
            names,
            options.timeout_seconds,
            exit_process=True,
            all_local=all_local(addresses),
        )
    except ClusterError as error:
        ending.register(ending.ExitStatusOnError(error, EXIT_CLUSTER_NOT_FORMED))
        raise
    _joined = Cluster(rank, names, addresses, member, options)
    return _joined


def current_cluster() -> Cluster | None:
    """Return the cluster of this process; None if it trains alone."""
    return _joined


def _in_notebook() -> bool:
    try:
        # IPython adds it to the builtins.
        shell = get_ipython()  # pyright: ignore
    except NameError:
        return False
    return hasattr(shell, "kernel")
