"""The workers that train together, as one of them sees them."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keras_strategy.cluster_resolver import roles
from keras_strategy.options.communication import CommunicationOptions
from keras_strategy.workers.settings import is_loopback

if TYPE_CHECKING:
    from keras_strategy.workers import Member


@dataclass(frozen=True, eq=False)
class Cluster:
    """The workers of a cluster, all of which train.

    Attributes:
        rank: This worker's number, from 0. Worker 0 is the chief.
        names: What each worker is called, by rank: "chief", "worker 0".
        addresses: "host:port" of each, by rank; empty where it is not known.
        member: This worker's connection to the others.
        options: How values shall travel.
    """

    rank: int
    names: tuple[str, ...]
    addresses: tuple[str, ...]
    member: "Member"
    options: CommunicationOptions

    @property
    def size(self) -> int:
        """The number of workers."""
        return len(self.names)

    @property
    def is_chief(self) -> bool:
        """Whether this worker is the one that writes."""
        return self.rank == 0

    @property
    def is_local(self) -> bool:
        """Whether all workers are known to be on this machine."""
        hosts = (address.rpartition(":")[0] for address in self.addresses)
        return all(is_loopback(host.strip("[]")) for host in hosts)

    def agree(self, operation: str, value: Any) -> list[Any]:
        """What each worker says, by rank; see `workers.Member.agree`."""
        return self.member.agree(operation, value)

    def differences(self, operation: str, value: Any) -> list[Any] | None:
        """What each worker says, by rank, if they say different things.

        Args:
            operation: What this worker is doing; all must do the same.
            value: What JSON can say; it may be long.

        Returns:
            None if all say the same.
        """
        text = json.dumps(value).encode()
        digest = hashlib.blake2b(text, digest_size=16).hexdigest()
        if len(set(self.agree(operation, digest))) == 1:
            return None
        return self.agree(f"{operation}: what differs", value)

    def listed(self, told: Iterable[Any]) -> str:
        """What each worker says, for a message."""
        pairs = zip(self.names, told, strict=True)
        return ", ".join(f"{name}: {what}" for name, what in pairs)


_joined: Cluster | None = None


def join(resolver: Any, options: CommunicationOptions) -> Cluster | None:
    """Meets the other workers of a cluster, once in a process.

    Args:
        resolver: A `ClusterResolver`, or None.
        options: How values shall travel.

    Returns:
        The cluster; None where this process trains alone: without a resolver, as the
        only worker, or as an evaluator.

    Raises:
        ValueError: If this process is none that trains.
        RuntimeError: If it has joined another cluster, or is a notebook.
    """
    global _joined
    if resolver is None:
        return None
    # The spec comes first: some resolvers learn who they are from it.
    spec = resolver.cluster_spec()
    task_type, task_id = resolver.task_type, resolver.task_id
    if not spec.jobs:
        return None
    task_type = "worker" if task_type is None else task_type
    task_id = 0 if task_id is None else task_id
    roles.validate(spec, task_type, task_id)
    if task_type == "ps":
        raise ValueError(
            "This process is a parameter server (task type 'ps'), which takes no part "
            "in MultiWorkerMirroredStrategy. Start the training program in the tasks "
            "'chief' and 'worker' alone."
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
    rank = roles.rank(spec, task_type, task_id)
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
            "A notebook cannot be one of several workers: they run the same program "
            "at the same time. Write the program to a file and start it with "
            f"`keras-strategy run --workers {len(names)} train.py`, or use "
            "MirroredStrategy for the devices of this machine."
        )
    from keras_strategy import workers

    member = workers.Member.join(
        workers.hub_address(addresses),
        rank,
        names,
        options.timeout_seconds,
        exit_process=True,
    )
    _joined = Cluster(rank, names, addresses, member, options)
    return _joined


def _in_notebook() -> bool:
    try:
        # IPython puts it among the builtins of its own processes.
        shell = get_ipython()  # pyright: ignore
    except NameError:
        return False
    return hasattr(shell, "kernel")
