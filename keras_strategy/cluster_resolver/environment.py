"""Base class and helpers of the resolvers that read environment variables."""

from __future__ import annotations

import abc
import dataclasses
import os
from typing import Any

from keras_strategy.cluster_resolver.base import ClusterResolver, format_master_url
from keras_strategy.cluster_resolver.cluster_spec import (
    ClusterSpec,
    as_int,
    join_host_port,
    port_number,
)


@dataclasses.dataclass(frozen=True)
class ClusterDescription:
    """Content of the environment: the cluster, and this process's task in it."""

    cluster: ClusterSpec
    task_type: str | None = None
    task_id: int | None = None
    rpc_layer: str | None = None
    session_master: str | None = None


class EnvironmentClusterResolver(ClusterResolver):
    """Resolver that reads the environment on every call; arguments override it."""

    # Where the user can set the task, for the error of `master`.
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
    def _describe(self) -> ClusterDescription:
        """Read the environment."""

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster of the environment; an empty one where it has none."""
        return self._describe().cluster

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task; empty where this process is the only one.

        Raises:
            RuntimeError: If neither an argument nor the environment gives a task.
            ValueError: If the cluster has no such task.
        """
        description = self._describe()
        if description.session_master is not None:
            return description.session_master
        spec = description.cluster
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
        """The `environment` that was passed to the resolver."""
        return self._environment

    def _look_up(self, name: str) -> Any:
        return getattr(self._describe(), name)


def required(name: str, launcher: str) -> str:
    """Return an environment variable that `launcher` always sets."""
    value = os.environ.get(name)
    if not value:
        raise RuntimeError(
            f"Expected the environment variable {name} to be set, as {launcher} does. "
            f"Received: {value!r}"
        )
    return value


def optional_int(name: str, minimum: int = 0) -> int | None:
    """Return an environment variable as an integer, or None if it is not set."""
    value = os.environ.get(name)
    return as_int(value, name, minimum) if value else None


def rank_and_size(rank_name: str, size_name: str, launcher: str) -> tuple[int, int]:
    """Return a rank and the number of ranks, which must be consistent."""
    size = as_int(required(size_name, launcher), size_name, minimum=1)
    rank = as_int(required(rank_name, launcher), rank_name)
    if rank >= size:
        raise ValueError(
            f"Expected {rank_name} to be less than {size_name} ({size}). Received: "
            f"{rank}"
        )
    return rank, size


def ranked_workers(size: int, num_on_host: int, host: str, port: int) -> ClusterSpec:
    """Return a cluster of `size` workers, the first `num_on_host` of them on `host`.

    The launchers that use this report only rank 0's host. All workers must get the same
    spec, so the other addresses stay empty instead of being guessed.
    """
    addresses = [
        join_host_port(host, port_number(port + rank, "port"))
        if rank < num_on_host
        else ""
        for rank in range(size)
    ]
    return ClusterSpec({"worker": addresses})
