"""`TPUClusterResolver`: the hosts of a Cloud TPU."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from keras_strategy.cluster_resolver.base import (
    ClusterResolver,
    format_master_url,
    local_device_kinds,
)
from keras_strategy.cluster_resolver.checks import as_int
from keras_strategy.cluster_resolver.cluster_spec import ClusterSpec
from keras_strategy.cluster_resolver.google import metadata, tpu_locate, tpu_source
from keras_strategy.values.topology_message import TPUHardwareFeature, parse_hardware_feature

TPU_WORKER_ID = "TPU_WORKER_ID"


class TPUSystemMetadata(NamedTuple):
    """Properties of a TPU system.

    Attributes:
        num_cores: The number of cores of all hosts.
        num_hosts: The number of hosts.
        num_of_cores_per_host: The number of cores of each host.
        topology: Always `None`; each backend has its own.
        devices: The names of this host's cores.
    """

    num_cores: int
    num_hosts: int
    num_of_cores_per_host: int
    topology: None
    devices: tuple[str, ...]


class TPUClusterResolver(ClusterResolver):
    """Cluster of the hosts of a Cloud TPU.

    It supports Compute Engine (the TPU API, and the metadata server of a TPU VM),
    Kubernetes Engine (the variables of its pods), and a TPU of this machine
    (`tpu="local"`). To look up a name, it needs the extra `tpu`, unless you pass a
    `service`.

    Args:
        tpu: The name of the TPU, its hosts' addresses
            (`"grpc://10.0.0.1:8470"`, several separated by commas), `"local"`, or a
            list of one of these. `None` uses the first that is set of
            KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS, TPU_NAME, TPU_CONFIG and
            TPU_WORKER_HOSTNAMES, or else the metadata server.
        zone: The zone of the TPU. Defaults to this machine's.
        project: The project of the TPU. Defaults to this machine's.
        job_name: The job of the TPU's hosts.
        coordinator_name: The job of the coordinator; without one it is not in
            the cluster.
        coordinator_address: The address of the coordinator, needed with
            `coordinator_name`.
        credentials: Credentials for the API. Defaults to the application's
            default ones.
        service: The object that `googleapiclient.discovery.build("tpu", "v1")`
            makes; `credentials` are then not used.
        discovery_url: A template with `{api}` and `{apiVersion}` of the https
            address where the API is described. The environment variable
            TPU_API_DISCOVERY_URL overrides it.

    Raises:
        ImportError: If the extra `tpu` is needed and not installed.
        ValueError: If no TPU is specified, or an argument is invalid.
        RuntimeError: If the name is empty on Google Cloud, or the metadata
            server is needed and does not answer.

    Example:
    ```python
    from keras_strategy.cluster_resolver import TPUClusterResolver

    resolver = TPUClusterResolver("grpc://10.0.0.1:8470,grpc://10.0.0.2:8470")
    assert resolver.cluster_spec().num_tasks("worker") == 2
    assert resolver.master() == "grpc://10.0.0.1:8470"
    ```
    """

    def __init__(
        self,
        tpu: str | Sequence[str] | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: Any = "default",
        service: Any = None,
        discovery_url: str | None = None,
    ) -> None:
        if coordinator_name and not coordinator_address:
            raise ValueError(
                "Expected `coordinator_address` with `coordinator_name`; no server is "
                f"started here. Received: coordinator_name={coordinator_name!r}, "
                f"coordinator_address={coordinator_address!r}"
            )
        if coordinator_name == job_name:
            raise ValueError(
                "Expected `coordinator_name` to differ from `job_name`. Received: "
                f"{coordinator_name!r} for both"
            )
        self._source = tpu_locate.locate_tpu(
            tpu, zone, project, credentials, service, discovery_url
        )
        self._task_type = job_name
        self._coordinator_name = coordinator_name
        self._coordinator_address = coordinator_address
        self._found_task_id: int | None = None
        self._hardware_feature: TPUHardwareFeature | None = None

    @staticmethod
    def connect(
        tpu: str | Sequence[str] | None = None,
        zone: str | None = None,
        project: str | None = None,
    ) -> TPUClusterResolver:
        """Make a resolver, and look up the TPU at once.

        The backend initializes the TPU itself when it first uses it. The arguments
        are those of `TPUClusterResolver`.

        Raises:
            ValueError: If there is no such TPU.
            RuntimeError: If the TPU is not ready.
        """
        resolver = TPUClusterResolver(tpu, zone, project)
        resolver.cluster_spec()
        return resolver

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    def cluster_spec(self) -> ClusterSpec:
        """Return the TPU's current hosts; no tasks for `"local"`.

        Raises:
            ValueError: If there is no such TPU.
            RuntimeError: If the TPU is not ready, or the metadata server does
                not answer.
        """
        if self._source is None:
            return ClusterSpec({})
        jobs = {str(self.task_type): self._source.addresses()}
        if self._coordinator_name:
            jobs[self._coordinator_name] = [str(self._coordinator_address)]
        return ClusterSpec(jobs)

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task, or of the TPU's first host.

        It is a string such as `"grpc://10.0.0.1:8470"`; empty for `"local"`. The
        protocol is always `"grpc"`.
        """
        if self._source is None:
            return ""
        if task_type is None or task_id is None:
            # Use only a task id that the user set: on every host the master is the
            # first one.
            task_type, task_id = self.task_type, getattr(self, "_task_id", None)
        address = self.cluster_spec().task_address(str(task_type), task_id or 0)
        return format_master_url(address, "grpc")

    def get_master(self) -> str:
        """Return `master()`."""
        return self.master()

    def get_job_name(self) -> str | None:
        """Return the job of the TPU's hosts."""
        return self.task_type

    def get_coordination_service_leader(self) -> str:
        """Return the name of the leading task, which is the first host."""
        return f"/job:{self.get_job_name()}/task:0"

    def get_tpu_system_metadata(self) -> TPUSystemMetadata:
        """Return the numbers of hosts and cores of the TPU.

        The active backend lists the cores of this host; all hosts are assumed to have
        the same number.
        """
        spec = self.cluster_spec()
        num_hosts = spec.num_tasks(str(self.task_type)) if spec else 1
        num_cores = self.num_accelerators()["TPU"]
        return TPUSystemMetadata(
            num_cores=num_hosts * num_cores,
            num_hosts=num_hosts,
            num_of_cores_per_host=num_cores,
            topology=None,
            devices=tuple(f"tpu:{index}" for index in range(num_cores)),
        )

    def set_tpu_topology(self, serialized_tpu_topology: bytes) -> None:
        """Set the topology of the TPU, for `tpu_hardware_feature`.

        Args:
            serialized_tpu_topology: The `serialized()` bytes of a
                `keras_strategy.tpu.experimental.Topology`, or of TensorFlow's.

        Raises:
            ValueError: If these bytes are not a topology.
        """
        self._hardware_feature = parse_hardware_feature(serialized_tpu_topology)

    @property
    def tpu_hardware_feature(self) -> TPUHardwareFeature | None:
        """The TPU's support for embeddings, from the topology that was set.

        It has `embedding_feature` and `num_embedding_devices_per_chip`; None before
        `set_tpu_topology`.
        """
        return self._hardware_feature

    def _count_accelerators(self) -> dict[str, int]:
        return {"TPU": local_device_kinds().count("TPU")}

    def _look_up(self, name: str) -> Any:
        if name != "task_id":
            return None
        if self._found_task_id is None:
            self._found_task_id = self._find_task_id()
        return self._found_task_id

    def _find_task_id(self) -> int:
        """Return the index of this host in the TPU; 0 if it is not in it."""
        value = os.environ.get(TPU_WORKER_ID)
        if value:
            return as_int(value, TPU_WORKER_ID)
        if isinstance(self._source, tpu_source.TPUVM):
            number = metadata.get_metadata("instance/attributes/agent-worker-number")
            return as_int(number, "agent-worker-number of the metadata server")
        addresses = self._source.addresses() if self._source else []
        for index, address in enumerate(addresses):
            if _is_local_address(address.rpartition(":")[0].strip("[]")):
                return index
        return 0


def _is_local_address(host: str) -> bool:
    """Return True if an IP address is this machine's; look up no names."""
    try:
        is_ipv6 = ipaddress.ip_address(host).version == 6
        family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
        # Connecting a datagram socket only chooses a route; it sends nothing.
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return probe.getsockname()[0] == host
    except (OSError, ValueError):
        return False
