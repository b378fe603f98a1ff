"""Base class of all cluster resolvers."""

from __future__ import annotations

import abc
import importlib
from typing import Any

from keras_strategy import late_binding
from keras_strategy.cluster_resolver.cluster_spec import ClusterSpec


class ClusterResolver(abc.ABC):
    """Description of a cluster, and of this process's place in it.

    A subclass implements `cluster_spec` for one kind of cluster, and sets
    `self._task_type`, `self._task_id` and `self._rpc_layer` (or overrides the
    properties) where its cluster provides them.

    - `task_type` is the name of this process's job ("chief", "worker", "ps",
      "evaluator");
    - `task_id` is its index in that job;
    - `rpc_layer` is the protocol prefix of the addresses that `master` returns.

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

    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None
    _environment: str | None = ""

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the current tasks of the cluster as a `ClusterSpec`.

        Implementations query the cluster manager on every call, and cache nothing
        that can change.
        """
        raise NotImplementedError

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task, with the protocol as prefix.

        Args:
            task_type: The job of the task. Defaults to this process's.
            task_id: The index of the task. Defaults to this process's.
            rpc_layer: The protocol, such as `"grpc"`. Defaults to the resolver's.

        Returns:
            A string such as `"grpc://10.0.0.1:2222"`; empty where there is no
            cluster, or where neither an argument nor the cluster gives a task.

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
        """Return the number of accelerators of each kind per worker.

        The active backend lists the devices of this process; all workers are
        assumed to have the same.

        Args:
            task_type: Unused; a process sees only its own devices.
            task_id: Unused.
            config_proto: Unused.

        Returns:
            A dict such as `{"GPU": 2}`; empty where there are only CPUs.
        """
        return self._count_accelerators()

    def _count_accelerators(self) -> dict[str, int]:
        kinds = local_device_kinds()
        return {kind: kinds.count(kind) for kind in kinds if kind != "CPU"}

    @property
    def job_identity(self) -> str:
        """Text that all tasks of this job have, and no other job's; `""` for none.

        Workers with another one are refused, unless KERAS_STRATEGY_SECRET is set.
        """
        return ""

    @property
    def environment(self) -> str | None:
        """The `environment` that was passed to the resolver, else `""`."""
        return self._environment

    @property
    def task_type(self) -> str | None:
        """The job of this process, or `None` where it is not known."""
        task_type = self._get("task_type")
        return None if task_type is None else str(task_type)

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job, or `None` where it is not known."""
        task_id = self._get("task_id")
        return None if task_id is None else int(task_id)

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The protocol between tasks, such as `"grpc"`, or `None`."""
        return self._get("rpc_layer")

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def _get(self, name: str) -> Any:
        value = getattr(self, f"_{name}")
        return self._look_up(name) if value is None else value

    def _look_up(self, name: str) -> Any:
        """Return the cluster's "task_type", "task_id" or "rpc_layer"."""
        return None


def local_device_kinds() -> list[str]:
    """Return the kind of each device of this process: "CPU", "GPU" or "TPU"."""
    # Only here: a query of the cluster must not start a backend.
    names = late_binding.get_engine().list_devices()
    return [name.partition(":")[0].upper() for name in names]


def format_master_url(master: str, rpc_layer: str | None = None) -> str:
    """Return an address with the protocol, if any, as prefix."""
    return f"{rpc_layer}://{master}" if rpc_layer else master


def import_extra(module: str, extra: str, user: str) -> Any:
    """Import a module of an optional extra, which `user` needs."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{user} needs the package of `{module}`, which is not installed "
            f'({error}). In a checkout, run: pip install ".[{extra}]"'
        ) from error
