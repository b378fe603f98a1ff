"""Resolvers without a source of their own: a described cluster, and a union."""

from typing import Any

from keras_strategy.cluster_resolver.base import ClusterResolver, format_master_url
from keras_strategy.cluster_resolver.cluster_spec import ClusterSpec


class SimpleClusterResolver(ClusterResolver):
    """Cluster that the arguments describe.

    Args:
        cluster_spec: The `ClusterSpec`, also that of `tf.train`.
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
        is_ours = isinstance(cluster_spec, ClusterSpec)
        if not is_ours and hasattr(cluster_spec, "as_cluster_def"):  # of TensorFlow
            cluster_spec = ClusterSpec(cluster_spec)
        elif not is_ours:
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


class UnionResolver(ClusterResolver):
    """Union of the clusters of several resolvers.

    Everything except the cluster (`task_type`, `task_id`, `rpc_layer`, `environment`,
    `num_accelerators()`) comes from the first resolver, unless a keyword overrides it.

    Args:
        *args: The `ClusterResolver`s, at least one.
        **kwargs: Overrides, any of `task_type`, `task_id` and `rpc_layer`.

    Raises:
        TypeError: If an argument is not a `ClusterResolver`.
        ValueError: If there is no resolver, or an unknown keyword.

    Example:
    ```python
    from keras_strategy.cluster_resolver import (
        ClusterSpec, SimpleClusterResolver, UnionResolver)

    workers = SimpleClusterResolver(
        ClusterSpec({"worker": ["10.0.0.1:2222"]}), task_type="worker", task_id=0)
    servers = SimpleClusterResolver(ClusterSpec({"ps": ["10.0.0.9:2222"]}))
    union = UnionResolver(workers, servers)
    assert union.cluster_spec().jobs == ["worker", "ps"]
    assert union.task_type == "worker"
    ```
    """

    def __init__(self, *args: ClusterResolver, **kwargs: Any) -> None:
        self._rpc_layer = kwargs.pop("rpc_layer", None)
        self._task_type = kwargs.pop("task_type", None)
        self._task_id = kwargs.pop("task_id", None)
        if kwargs:
            raise ValueError(
                "Expected no keywords but `task_type`, `task_id` and `rpc_layer`. "
                f"Received: {sorted(kwargs)}"
            )
        if not args:
            raise ValueError("Expected at least one ClusterResolver. Received: none")
        for resolver in args:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(
                    "Expected every argument to be a ClusterResolver. Received: "
                    f"{resolver!r} (of type {type(resolver).__name__})"
                )
        self._resolvers = args

    def cluster_spec(self) -> ClusterSpec:
        """Return the union of the resolvers' clusters.

        Where all resolvers give a job as a list, the lists are concatenated in order.
        Where one gives it as a dict (its indices have gaps), all are merged by index.

        Raises:
            KeyError: If two resolvers give the same index of a job that is
                merged by index.
        """
        # One call for each resolver: it may query the network.
        parts: dict[str, list[list[str] | dict[int, str]]] = {}
        for resolver in self._resolvers:
            for job_name, tasks in resolver.cluster_spec().as_dict().items():
                parts.setdefault(job_name, []).append(tasks)
        return ClusterSpec({name: _merge(name, jobs) for name, jobs in parts.items()})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of the named task, or else the first resolver's master."""
        if task_type is not None and task_id is not None:
            master = self.cluster_spec().task_address(task_type, task_id)
            return format_master_url(master, rpc_layer or self._rpc_layer)
        return self._resolvers[0].master(rpc_layer=rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """Return the number of accelerators from the first resolver."""
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)

    @property
    def environment(self) -> str | None:
        """The first resolver's environment."""
        return self._resolvers[0].environment

    def _look_up(self, name: str) -> Any:
        return getattr(self._resolvers[0], name)


def _merge(
    job_name: str, parts: list[list[str] | dict[int, str]]
) -> list[str] | dict[int, str]:
    if all(isinstance(part, list) for part in parts):
        return [address for part in parts for address in part]  # pyright: ignore
    merged: dict[int, str] = {}
    for part in parts:
        tasks = dict(enumerate(part)) if isinstance(part, list) else part
        duplicates = sorted(merged.keys() & tasks.keys())
        if duplicates:
            raise KeyError(
                f"Expected every task of job {job_name!r} from only one resolver. "
                f"Received: indices {duplicates} more than once"
            )
        merged.update(tasks)
    return merged
