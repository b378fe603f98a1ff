"""Cluster membership: this process's place among the workers that train together."""

import builtins
import contextlib
import gc
import hashlib
import itertools
import json
import os
import socket
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from keras_strategy.cluster import elastic, network, process_exit, rendezvous
from keras_strategy.cluster.client import CoordinatorClient
from keras_strategy.cluster_resolver import cluster_spec
from keras_strategy.errors import ClusterError
from keras_strategy.options import CommunicationOptions

# Number of parts into which a list is divided to find a difference, and number of
# workers that a message names.
_PARTS, _MAX_NAMED = 64, 8
# Largest cluster in which each worker tries to connect to all others.
_MAX_MESH = 16


@dataclass(frozen=True, eq=False)
class Cluster:
    """The workers of a cluster, all of which train: names and addresses by rank."""

    rank: int
    names: tuple[str, ...]
    addresses: tuple[str, ...]
    client: CoordinatorClient
    options: CommunicationOptions
    # The address by which the other workers reach each one's machine.
    hosts: tuple[str, ...] = ()
    # Strategies that train on it.
    strategies: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    # Counts the elements that `run` receives; and their numbers since the last check.
    elements: Iterator[int] = field(default_factory=itertools.count)
    batch_numbers: list[int] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.names)

    @property
    def is_chief(self) -> bool:
        return self.rank == 0

    @property
    def host(self) -> str:
        return self.hosts[self.rank]

    @property
    def is_local(self) -> bool:
        """True if all workers are on this machine."""
        return all(map(network.is_loopback, self.hosts))

    def exchange(
        self, operation: str, value: Any, seconds: float | None = None
    ) -> list[Any]:
        return self.client.exchange(operation, value, seconds)

    def start_exchange(self, operation: str, value: Any) -> Callable[[], list[Any]]:
        return self.client.start_exchange(operation, value)

    def listen(self, backlog: int | None = None) -> socket.socket:
        """Listen on a free port, where no other machine can connect unless needed."""
        if self.is_local:
            return socket.create_server((network.LOOPBACK, 0), backlog=backlog)
        return network.listen_on_all_interfaces(backlog=backlog)

    def listen_at_own_address(self) -> tuple[socket.socket, str]:
        """Listen on the port of this worker's address or a free one; return both."""
        # On every interface, as TensorFlow's server binds it. Launchers may use the
        # port themselves, for what they call the master; so may another job of this
        # machine, whose server starts later.
        host, port = cluster_spec.split_host_port(self.addresses[self.rank])
        listener = None
        with contextlib.suppress(OSError):
            if port:
                _reserved.append(rendezvous.reserve_name(f"server at port {port}"))
            listener = network.listen_on_all_interfaces(int(port or 0))
        listener = listener or network.listen_on_all_interfaces()
        port = listener.getsockname()[1]
        return listener, cluster_spec.join_host_port(host or self.host, port)

    def exchange_addresses(self, library: str, address: str) -> list[str]:
        """Return the workers' addresses, at which they listen during the call."""
        # All workers raise ClusterError if one of them cannot connect to another.
        operation = f"the addresses of {library}"
        addresses: list[str] = self.exchange(operation, address)
        if self.is_local:
            return addresses
        steps = range(1, self.size)
        if self.size > _MAX_MESH:
            steps = [2**n for n in range((self.size - 1).bit_length())]
        others = {(self.rank + step) % self.size for step in steps}
        failed = network.find_unreachable({n: addresses[n] for n in sorted(others)})
        found = self.exchange(f"{operation}: those that cannot be reached", failed)
        failures = [
            f"{self.names[rank]}, at {self.hosts[rank]}, cannot connect to "
            f"{self.names[other]} at {addresses[other]}: {reason}"
            for rank, pairs in enumerate(found)
            for other, reason in pairs
        ]
        if not failures:
            return addresses
        if len(failures) > _MAX_NAMED:
            failures[_MAX_NAMED:] = [f"{len(failures) - _MAX_NAMED} more pairs cannot"]
        raise ClusterError(
            "\n".join(failures)
            + f"\nExpected that {library} can connect each worker's machine to the "
            f"others at {network.describe_ports(addresses)}. If a firewall blocks "
            "these ports, open them. If this address of a machine is the wrong one, "
            f"set the environment variable {network.INTERFACE_VARIABLE} on it to the "
            "name of the network interface that the others can reach."
        )

    def values_if_different(self, operation: str, value: Any) -> list[Any] | None:
        """Return the workers' values by rank if they differ, else None."""
        # The value may be long: only its digest is exchanged unless the digests differ.
        if len(set(self.exchange(operation, json_digest(value)))) == 1:
            return None
        return self.exchange(f"{operation}: what differs", value)

    def first_difference(
        self, operation: str, items: Sequence[Any], extra: Any = None
    ) -> tuple[list[Any], tuple[int, list[Any]] | None]:
        """Find the first item of a list that is not the same on all workers."""
        # The result has the workers' `extra` values; and the index with the workers'
        # items there (None where a list is shorter), or None if all are the same.
        # However long the list is, the messages are short: a digest of it, and where
        # those differ the digests of its parts, until one item is left.
        replies = self.exchange(operation, [json_digest(items), len(items), extra])
        extras = [value for *_, value in replies]
        if all(digest == replies[0][0] for digest, *_ in replies):
            return extras, None
        low, high = 0, max(count for _, count, _ in replies)
        while high - low > 1:
            step = -(-(high - low) // _PARTS)
            starts = range(low, high, step)
            digests = [json_digest(items[start : start + step]) for start in starts]
            parts = self.exchange(f"{operation}: what differs", digests)
            differ = (len(set(part)) > 1 for part in zip(*parts, strict=True))
            # The lists differ, so at least one part does.
            low = starts[next(n for n, different in enumerate(differ) if different)]
            high = min(low + step, high)
        item = items[low] if low < len(items) else None
        return extras, (low, self.exchange(f"{operation}: what differs", item))

    def format_by_value(self, values: Iterable[Any]) -> str:
        """Format the workers' values, with the names of those that have the same."""
        groups: dict[str, list[str]] = {}
        for name, value in zip(self.names, values, strict=True):
            groups.setdefault(str(value), []).append(name)
        parts = []
        for value, names in groups.items():
            if len(names) > _MAX_NAMED + 1:
                names = [*names[:_MAX_NAMED], f"{len(names) - _MAX_NAMED} more"]
            joined = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
            parts.append(f"{joined}: {value}")
        return "; ".join(parts)

    def format_by_worker(self, values: Iterable[Any]) -> str:
        pairs = zip(self.names, values, strict=True)
        return ", ".join(f"{name}: {value}" for name, value in pairs)


class DelayedExchange:
    """An exchange after each step, whose values come a step later, so nobody waits."""

    def __init__(self, cluster: Cluster, operation: str):
        self._cluster, self._operation = cluster, operation
        self._wait: Callable[[], list[Any]] | None = None
        self._values: list[Any] = []

    def start(self, value: Any) -> list[Any]:
        """Exchange a value, and return the values of the step before; [] at first."""
        previous = self.wait()
        self._wait = self._cluster.start_exchange(self._operation, value)
        return previous

    def wait(self) -> list[Any]:
        """Wait for the values of the last step."""
        if self._wait is not None:
            self._values, self._wait = self._wait(), None
        return self._values


def json_digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


_joined: Cluster | None = None
# Names of ports, reserved while this process lives.
_reserved: list[socket.socket | None] = []


def find_workers(resolver: Any) -> tuple[int, tuple[str, ...], tuple[str, ...]] | None:
    """Return this worker's rank, and all names and addresses; None if it is alone."""
    # First: some resolvers set their task from the spec.
    spec = resolver.cluster_spec()
    task_type, task_id = resolver.task_type, resolver.task_id
    if not spec.jobs:
        return None
    task_type = "worker" if task_type is None else task_type
    task_id = 0 if task_id is None else task_id
    cluster_spec.validate_task(spec, task_type, task_id)
    if task_type == "ps":
        raise ValueError(
            "This process is a parameter server (task type 'ps'), which "
            "MultiWorkerMirroredStrategy does not use. Start the training program only "
            "in the tasks 'chief' and 'worker'."
        )
    tasks = cluster_spec.training_tasks(spec)
    if task_type == "evaluator" or len(tasks) == 1:
        return None
    names = tuple(job if job == "chief" else f"{job} {index}" for job, index in tasks)
    addresses = tuple(spec.task_address(*task) for task in tasks)
    return tasks.index((task_type, task_id)), names, addresses


def join_cluster(
    resolver: Any, options: CommunicationOptions, can_leave: bool = True
) -> Cluster | None:
    """Join the cluster, at most one at a time; return None where it trains alone."""
    global _joined
    elastic.check_has_joined()
    found = None if resolver is None else find_workers(resolver)
    if found is None:
        return None
    rank, names, addresses = found
    if _joined is not None:
        if (_joined.rank, _joined.addresses) == (rank, addresses):
            if options not in (_joined.options, CommunicationOptions()):
                raise ValueError(
                    "All strategies of a process share one connection, so their "
                    "`communication_options` must be equal, or None. Received: "
                    f"{options}, after {_joined.options}"
                )
            return _joined
        gc.collect()  # the strategies of variables that nothing else refers to
        if _joined.strategies or not can_leave:
            rule = (
                "Call `close()` on its strategies before you connect to"
                if can_leave
                else "With this Keras backend, a process connects only once: start "
                "another one for"
            )
            raise RuntimeError(
                "This process already belongs to another cluster, as "
                f"'{_joined.names[_joined.rank]}' of {list(_joined.addresses)}. {rule} "
                f"{list(addresses)}."
            )
        leave_cluster()
    # IPython adds the function to the builtins.
    if hasattr(getattr(builtins, "get_ipython", lambda: None)(), "kernel"):
        raise RuntimeError(
            "A notebook cannot be one of several workers, which run the same program "
            "at the same time. Put the training into a function and call "
            f"`keras_strategy.launch(train, workers={len(names)})`, or use "
            "MirroredStrategy for the devices of this machine."
        )
    job = getattr(resolver, "job_identity", "")
    all_local = network.all_local(addresses)
    try:
        client = CoordinatorClient(
            rendezvous.rendezvous_address(addresses, job),
            rank,
            names,
            options.timeout_seconds,
            exit_process=True,
            is_elastic=can_leave and elastic.elastic_worker() is not None,
            secret=os.environ.get(rendezvous.SECRET_VARIABLE) or job,
            all_local=all_local,
        )
    except ClusterError:
        # It sets the exit status.
        process_exit.register(process_exit.ExitHandler())
        raise
    own = network.LOOPBACK if all_local else client.host
    interface = options.interface or os.environ.get(network.INTERFACE_VARIABLE)
    if interface:  # not before it has joined: an error ends the others as well
        own = network.address_of_interface(interface)
    hosts = client.exchange("the addresses of the workers' machines", own)
    # A worker on the chief's machine may have reached it over the loopback.
    hosts = tuple(hosts[0] if network.is_loopback(host) else host for host in hosts)
    _joined = Cluster(rank, names, addresses, client, options, hosts)
    return _joined


def leave_cluster() -> None:
    """Disconnect from the other workers, so that this process can join others."""
    global _joined
    if _joined is not None:
        _joined.client.leave()
        _joined = None


def current_cluster() -> Cluster | None:
    """Return the cluster of this process; None if it trains alone."""
    return _joined
