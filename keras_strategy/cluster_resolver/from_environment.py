"""What the resolvers that read environment variables have in common."""

from __future__ import annotations

import abc
import dataclasses
import os
from typing import Any

from keras_strategy.cluster_resolver.base import ClusterResolver, format_master_url
from keras_strategy.cluster_resolver.checks import as_int, join_host_port, port_number
from keras_strategy.cluster_resolver.cluster_spec import ClusterSpec


@dataclasses.dataclass(frozen=True)
class Description:
    """What an environment says of the cluster and of this process's place."""

    cluster: ClusterSpec
    task_type: str | None = None
    task_id: int | None = None
    rpc_layer: str | None = None
    session_master: str | None = None


class EnvironmentClusterResolver(ClusterResolver):
    """A resolver that reads the environment anew on every question.

    Args:
        task_type: Overrides what the environment says.
        task_id: Overrides what the environment says.
        rpc_layer: Overrides what the environment says.
        environment: What `environment` gives.
    """

    # Where the task can be said, for the error of `master`.
    _task_hint = "the environment"

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._environment = environment

    @abc.abstractmethod
    def _describe(self) -> Description:
        """Reads the environment."""

    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster that the environment describes.

        Returns:
            A `ClusterSpec`; an empty one where the environment names no
            cluster.
        """
        return self._describe().cluster

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, with the protocol in front.

        Args:
            task_type: The job of the task. Defaults to this process's.
            task_id: The index of the task. Defaults to this process's.
            rpc_layer: The protocol. Defaults to the resolver's.

        Returns:
            The address; empty where this process is the only one.

        Raises:
            RuntimeError: If no task is named here or in the environment.
            ValueError: If the cluster has no such task.
        """
        described = self._describe()
        if described.session_master is not None:
            return described.session_master
        spec = described.cluster
        if not spec or (len(spec.jobs) == 1 and spec.num_tasks(spec.jobs[0]) == 1):
            return ""
        task_type = task_type if task_type is not None else self.task_type
        task_id = task_id if task_id is not None else self.task_id
        if task_type is None or task_id is None:
            raise RuntimeError(
                "Expected `task_type` and `task_id` as arguments or in "
                f"{self._task_hint}. Received: task_type={task_type!r}, "
                f"task_id={task_id!r}"
            )
        rpc_layer = rpc_layer if rpc_layer is not None else self.rpc_layer
        return format_master_url(spec.task_address(task_type, task_id), rpc_layer)

    @property
    def environment(self) -> str | None:
        """The `environment` that the resolver was made with."""
        return self._environment

    def _told(self, name: str) -> Any:
        return getattr(self._describe(), name)


def required(name: str, who: str) -> str:
    """The value of an environment variable that `who` cannot do without."""
    value = os.environ.get(name)
    if not value:
        raise RuntimeError(
            f"Expected the environment variable {name} to be set, as {who} does. "
            f"Received: {value!r}"
        )
    return value


def required_int(name: str, who: str, minimum: int = 0) -> int:
    """The same for one that is an integer."""
    value = required(name, who)
    return as_int(value, name, minimum)


def rank_and_size(rank_name: str, size_name: str, who: str) -> tuple[int, int]:
    """A rank and the number of ranks, which must fit together."""
    size = required_int(size_name, who, minimum=1)
    rank = required_int(rank_name, who)
    if rank >= size:
        raise ValueError(
            f"Expected {rank_name} to be less than {size_name} ({size}). Received: "
            f"{rank}"
        )
    return rank, size


def ranked_workers(size: int, known: int, host: str, port: int) -> ClusterSpec:
    """A cluster of `size` workers, of which the first `known` are on `host`.

    The launchers that use this tell rank 0's host alone. Every worker must come
    to the same spec, so the others' addresses stay empty rather than guessed.
    """
    addresses = [
        join_host_port(host, port_number(port + rank, "port")) if rank < known else ""
        for rank in range(size)
    ]
    return ClusterSpec({"worker": addresses})
