"""`SimpleClusterResolver`: a cluster that the caller describes."""

from __future__ import annotations

from typing import Any

from keras_strategy.cluster_resolver.base import ClusterResolver, format_master_url
from keras_strategy.cluster_resolver.cluster_spec import ClusterSpec


class SimpleClusterResolver(ClusterResolver):
    """Gives back the cluster that it is made of.

    Args:
        cluster_spec: The `ClusterSpec`.
        master: The address that `master()` gives when no task is named.
        task_type: The job of this process.
        task_id: The index of this process in its job.
        environment: What `environment` gives.
        num_accelerators: What `num_accelerators()` gives, such as
            `{"GPU": 8}`. Defaults to `{}`.
        rpc_layer: The protocol between tasks, such as `"grpc"`.

    Raises:
        TypeError: If `cluster_spec` is not a `ClusterSpec`, or `master` is not
            a string.

    Example:
    ```python
    from keras_strategy.cluster_resolver import ClusterSpec, SimpleClusterResolver

    resolver = SimpleClusterResolver(
        ClusterSpec({"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}),
        task_type="worker",
        task_id=1,
        rpc_layer="grpc",
    )
    assert resolver.master("worker", 0) == "grpc://10.0.0.1:2222"
    ```
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: dict[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(
                "Expected `cluster_spec` to be a keras_strategy ClusterSpec; wrap "
                "what you have as ClusterSpec(...). Received: "
                f"{cluster_spec!r} (of type {type(cluster_spec).__name__})"
            )
        if not isinstance(master, str):
            raise TypeError(
                f"Expected `master` to be a string. Received: {master!r} (of type "
                f"{type(master).__name__})"
            )
        self._cluster_spec = cluster_spec
        self._master = master
        self._task_type = task_type
        self._task_id = task_id
        self._environment = environment
        self._num_accelerators = num_accelerators
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Returns the `ClusterSpec` that the resolver was made of."""
        return self._cluster_spec

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of the named task, or the resolver's `master`.

        Args:
            task_type: The job of the task.
            task_id: The index of the task. Both are needed to name one.
            rpc_layer: The protocol. Defaults to the resolver's.

        Returns:
            The address, with the protocol in front where there is one.

        Raises:
            ValueError: If the cluster has no such task.
        """
        master = self._master
        if task_type is not None and task_id is not None:
            master = self._cluster_spec.task_address(task_type, task_id)
        return format_master_url(master, rpc_layer or self._rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """Returns the `num_accelerators` that the resolver was made with.

        Args:
            task_type: Unused.
            task_id: Unused.
            config_proto: Unused.

        Returns:
            A dict such as `{"GPU": 8}`; `{}` if none was given. No device is
            looked for.
        """
        del task_type, task_id, config_proto
        return {} if self._num_accelerators is None else self._num_accelerators

    @property
    def environment(self) -> str:
        """The `environment` that the resolver was made with."""
        return self._environment
