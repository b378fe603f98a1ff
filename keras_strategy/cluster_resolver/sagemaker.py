"""`SageMakerClusterResolver`: the hosts of an Amazon SageMaker training job."""

from __future__ import annotations

import json

from keras_strategy.cluster_resolver.checks import join_host_port, port_number
from keras_strategy.cluster_resolver.cluster_spec import ClusterSpec
from keras_strategy.cluster_resolver.from_environment import (
    ClusterDescription,
    EnvironmentClusterResolver,
    required,
)

SM_HOSTS = "SM_HOSTS"
SM_CURRENT_HOST = "SM_CURRENT_HOST"


class SageMakerClusterResolver(EnvironmentClusterResolver):
    """Cluster of SageMaker's SM_HOSTS and SM_CURRENT_HOST.

    Every host of the job is a worker; they are sorted by name.

    Args:
        port: The port that every worker listens on.
        task_type: Overrides the task type.
        task_id: Overrides the task id.
        rpc_layer: The protocol between workers.
        environment: The value of the property `environment`.

    Example:
    ```python
    import os

    from keras_strategy.cluster_resolver import SageMakerClusterResolver

    os.environ["SM_HOSTS"] = '["algo-1", "algo-2"]'
    os.environ["SM_CURRENT_HOST"] = "algo-2"
    resolver = SageMakerClusterResolver(port=2223)
    assert resolver.cluster_spec().task_address("worker", 0) == "algo-1:2223"
    assert resolver.task_id == 1
    del os.environ["SM_HOSTS"], os.environ["SM_CURRENT_HOST"]
    ```
    """

    def __init__(
        self,
        port: int = 2223,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        super().__init__(task_type, task_id, rpc_layer, environment)
        self._port = port_number(port, "`port`")

    def _describe(self) -> ClusterDescription:
        text = required(SM_HOSTS, "a SageMaker training job")
        current = required(SM_CURRENT_HOST, "a SageMaker training job")
        try:
            hosts = json.loads(text)
        except (ValueError, RecursionError):
            hosts = None
        if not isinstance(hosts, list) or not all(
            isinstance(host, str) and host for host in hosts
        ):
            raise ValueError(
                f"Expected the environment variable {SM_HOSTS} to be a JSON list of "
                f"host names. Received: {text[:200]!r}"
            )
        hosts = sorted(hosts)
        if current not in hosts:
            # TensorFlow returns an empty cluster here, so that every host trains
            # alone and nobody notices.
            raise ValueError(
                f"Expected {SM_CURRENT_HOST} to be one of {SM_HOSTS} ({hosts}). "
                f"Received: {current!r}"
            )
        spec = ClusterSpec(
            {"worker": [join_host_port(host, self._port) for host in hosts]}
        )
        return ClusterDescription(spec, "worker", hosts.index(current))
