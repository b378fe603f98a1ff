"""`GCEClusterResolver`: the machines of a Google Compute Engine instance group."""

from typing import Any

from keras_strategy.cluster_resolver.base import ClusterResolver
from keras_strategy.cluster_resolver.cluster_spec import (
    ClusterSpec,
    join_host_port,
    port_number,
)
from keras_strategy.cluster_resolver.google_api import build_service, summarize


class GCEClusterResolver(ClusterResolver):
    """Cluster of the running machines of a group, from the Compute Engine API.

    The API does not report which of them this one is: pass each its `task_id`,
    which is its index in the sorted addresses. Needs the extra `gce`, unless you
    pass a `service`.

    Args:
        project: The Google Cloud project of the group.
        zone: The zone of the instance group.
        instance_group: The name of the instance group.
        port: The port that every task listens on.
        task_type: The job of all machines of the group.
        task_id: The index of this machine.
        rpc_layer: The protocol between tasks.
        credentials: Credentials for the API. Defaults to the application's
            default ones.
        service: The object that `googleapiclient.discovery.build("compute",
            "v1")` makes; `credentials` are then not used.

    Raises:
        ImportError: If the extra `gce` is not installed and there is no
            `service`.

    Example:
    ```python
    from google.auth.credentials import AnonymousCredentials

    from keras_strategy.cluster_resolver import GCEClusterResolver

    resolver = GCEClusterResolver(
        "my-project", "us-west1-b", "my-group", port=8470, task_id=1,
        credentials=AnonymousCredentials())  # leave out to use your own
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    ```
    """

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = "worker",
        task_id: int = 0,
        rpc_layer: str | None = "grpc",
        credentials: Any = "default",
        service: Any = None,
    ) -> None:
        self._location = {"project": project, "zone": zone}
        self._instance_group = instance_group
        self._port = port_number(port, "`port`")
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._service = service or build_service(
            "compute", "v1", credentials, "gce", "GCEClusterResolver"
        )

    def cluster_spec(self) -> ClusterSpec:
        """Return the machines of the group that run now, as one job.

        Raises:
            RuntimeError: If the API cannot be queried, or its answer is invalid.
        """
        addresses = []
        try:
            groups = self._service.instanceGroups()
            request = groups.listInstances(
                **self._location,
                instanceGroup=self._instance_group,
                body={"instanceState": "RUNNING"},
                orderBy="name",
            )
            while request is not None:
                response = request.execute()
                for item in response.get("items", []):
                    name = item["instance"].split("/")[-1]
                    get = self._service.instances().get(**self._location, instance=name)
                    host = get.execute()["networkInterfaces"][0]["networkIP"]
                    addresses.append(join_host_port(host, self._port))
                request = groups.listInstances_next(
                    previous_request=request, previous_response=response
                )
        except Exception as error:
            raise RuntimeError(
                f"Could not look up the instance group {self._instance_group!r} "
                "(project {project!r}, zone {zone!r}): ".format(**self._location)
                + f"{summarize(error)}. Please check these arguments of "
                "GCEClusterResolver and the permission compute.instances.get"
            ) from None
        # All machines need the same order.
        return ClusterSpec({str(self.task_type): sorted(addresses)})

    @property
    def task_type(self) -> str | None:
        """The job of all machines of the group; it cannot be set."""
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        raise RuntimeError(
            "You cannot reset the task_type of the GCEClusterResolver after it has "
            f"been created: pass it as an argument. Received: {task_type!r}"
        )
