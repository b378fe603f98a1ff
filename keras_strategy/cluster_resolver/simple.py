"""Resolvers for clusters that the caller describes."""

from __future__ import annotations

from keras_strategy.cluster_resolver.base import ClusterResolver, format_master_url
from keras_strategy.cluster_resolver.cluster_spec import ClusterSpec


class SimpleClusterResolver(ClusterResolver):
    """Cluster that the arguments describe.

    Args:
        cluster_spec: The `ClusterSpec`.
        master: The address that `master()` returns when no task is named.
        task_type: The job of this process.
        task_id: The index of this process in its job.
        environment: The value of the property `environment`.
        num_accelerators: The value that `num_accelerators()` returns, such as
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
                "your cluster as ClusterSpec(...). Received: "
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
        """Return the `ClusterSpec` that was passed to the resolver."""
        return self._cluster_spec

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of the named task, or else the resolver's `master`."""
        master = self._master
        if task_type is not None and task_id is not None:
            master = self._cluster_spec.task_address(task_type, task_id)
        return format_master_url(master, rpc_layer or self._rpc_layer)

    def _count_accelerators(self) -> dict[str, int]:
        return {} if self._num_accelerators is None else self._num_accelerators

    @property
    def environment(self) -> str:
        """The `environment` that was passed to the resolver."""
        return self._environment
