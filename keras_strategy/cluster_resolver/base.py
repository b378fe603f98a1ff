"""`ClusterResolver`: the questions every kind of cluster answers."""

from __future__ import annotations

import abc
from typing import Any

from keras_strategy.cluster_resolver.cluster_spec import ClusterSpec
from keras_strategy.cluster_resolver.local_devices import local_device_kinds


class ClusterResolver(abc.ABC):
    """Tells a process who it is in its cluster, and who else is there.

    A subclass answers for one kind of cluster. It implements `cluster_spec`, and
    sets `self._task_type`, `self._task_id` and `self._rpc_layer` (or overrides the
    properties) where its cluster tells them.

    - `task_type` is the name of this process's job ("chief", "worker", "ps",
      "evaluator");
    - `task_id` is its index in that job;
    - `rpc_layer` is the protocol in front of the addresses that `master` gives.

    Example:
    ```python
    from keras_strategy.cluster_resolver import ClusterResolver, ClusterSpec

    class TwoHosts(ClusterResolver):
        def __init__(self, task_id):
            self._task_type, self._task_id = "worker", task_id

        def cluster_spec(self):
            return ClusterSpec({"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]})

    assert TwoHosts(task_id=1).task_id == 1
    assert TwoHosts(task_id=1).master() == "10.0.0.2:2222"
    ```
    """

    _task_type: str | None
    _task_id: int | None
    _rpc_layer: str | None

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster as it is now.

        Implementations ask the cluster's manager on every call, and cache
        nothing that can change.

        Returns:
            A `ClusterSpec`.
        """
        raise NotImplementedError

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
            rpc_layer: The protocol, such as `"grpc"`. Defaults to the
                resolver's.

        Returns:
            A string such as `"grpc://10.0.0.1:2222"`; empty where there is no
            cluster, or no task is named and this process's is not known.

        Raises:
            ValueError: If the cluster has no such task.
        """
        task_type = task_type if task_type is not None else self.task_type
        task_id = task_id if task_id is not None else self.task_id
        if task_type is None or task_id is None:
            return ""
        address = self.cluster_spec().task_address(task_type, task_id)
        return format_master_url(address, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """Returns the number of accelerators of each kind per worker.

        The backend in use is asked for the devices of this process; all workers
        are taken to be alike.

        Args:
            task_type: Unused; a process sees only its own devices.
            task_id: Unused, likewise.
            config_proto: Unused.

        Returns:
            A dict such as `{"GPU": 2}`; empty where there are only CPUs.
        """
        del task_type, task_id, config_proto
        counts: dict[str, int] = {}
        for kind in local_device_kinds():
            if kind != "CPU":
                counts[kind] = counts.get(kind, 0) + 1
        return counts

    @property
    def environment(self) -> str | None:
        """The kind of environment; always `""` outside Google's own."""
        return ""

    @property
    def task_type(self) -> str | None:
        """The job of this process, or `None` where the cluster does not tell."""
        task_type = self._set_or_told("task_type")
        return None if task_type is None else str(task_type)

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job, or `None` where not known."""
        task_id = self._set_or_told("task_id")
        return None if task_id is None else int(task_id)

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The protocol between tasks, such as `"grpc"`, or `None`."""
        return self._set_or_told("rpc_layer")

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def _set_or_told(self, name: str) -> Any:
        # What was set may be 0, and counts.
        value = getattr(self, f"_{name}", None)
        return self._told(name) if value is None else value

    def _told(self, name: str) -> Any:
        """What the cluster tells of "task_type", "task_id" or "rpc_layer"."""
        return None


def format_master_url(master: str, rpc_layer: str | None = None) -> str:
    """Puts the protocol, if any, in front of an address."""
    return f"{rpc_layer}://{master}" if rpc_layer else master
