"""`TPUClusterResolver`: the hosts of a Cloud TPU.

The arguments, or else the environment, choose the source of the addresses: the caller,
the metadata server of a TPU VM, or the TPU API.
"""

from __future__ import annotations

import functools
import ipaddress
import json
import os
import re
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from keras_strategy.cluster_resolver import google_api
from keras_strategy.cluster_resolver.base import (
    ClusterResolver,
    format_master_url,
    local_device_kinds,
)
from keras_strategy.cluster_resolver.cluster_spec import (
    ClusterSpec,
    as_int,
    join_host_port,
    port_number,
    split_host_port,
)
from keras_strategy.topology_proto import TPUHardwareFeature, parse_hardware_feature

TPU_PORT = 8470
GKE_ENDPOINTS = "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS"
TPU_NAME = "TPU_NAME"
TPU_CONFIG = "TPU_CONFIG"
TPU_WORKER_HOSTNAMES = "TPU_WORKER_HOSTNAMES"
TPU_VARIABLES = GKE_ENDPOINTS, TPU_NAME, TPU_CONFIG, TPU_WORKER_HOSTNAMES
TPU_WORKER_ID = "TPU_WORKER_ID"
TPU_DISCOVERY_URL = "TPU_API_DISCOVERY_URL"

_ENDPOINTS = "instance/attributes/worker-network-endpoints"
_ZONE = re.compile(r"[a-z0-9-]+")
_PROJECT = re.compile(r"[a-z0-9.:-]+")

# Returns `host:port` of every host of a TPU, in the order of the tasks.
AddressSource = Callable[[], list[str]]


def tpu_vm_addresses() -> list[str]:
    """Return the hosts of the slice of this TPU VM, from its metadata server."""
    text = google_api.get_metadata(_ENDPOINTS)
    hosts = []
    for worker in text.split(","):
        # Old servers have name:id:ip, new ones only the host.
        parts = worker.strip().split(":")
        if len(parts) not in (1, 3) or not parts[-1]:
            raise RuntimeError(
                "Expected the metadata server's worker-network-endpoints to be "
                f"hosts, or name:id:ip. Received: {text[:200]!r}"
            )
        hosts.append(join_host_port(parts[-1], TPU_PORT))
    return hosts


def _node_addresses(
    name: str, project: str, zone: str, make_service: Callable[[], Any]
) -> list[str]:
    """Return the current hosts of a TPU with a name, from the TPU API."""

    def not_found(reason: str) -> ValueError:
        return ValueError(
            f"Could not lookup TPU metadata from name '{name}' (project '{project}', "
            f"zone '{zone}'). Please doublecheck the tpu argument in the "
            f"TPUClusterResolver constructor. Exception: {reason}"
        )

    full_name = f"projects/{project}/locations/{zone}/nodes/{name}"
    try:
        # New each time, since an old connection times out.
        nodes = make_service().projects().locations().nodes()
        node = nodes.get(name=full_name).execute()
    except ImportError:
        raise
    except Exception as error:
        raise not_found(google_api.summarize(error)) from None
    if not isinstance(node, dict):
        raise not_found("the answer is not a node")
    if node.get("state") != "READY":
        raise RuntimeError(
            f'TPU "{name}" is not yet ready; state: "{node.get("state")}". '
            'Expected the state "READY"'
        )
    endpoints = node.get("networkEndpoints", [node])
    try:
        pairs = [(e["ipAddress"], port_number(e["port"], "port")) for e in endpoints]
    except (KeyError, TypeError, ValueError):
        pairs = []
    if not pairs or not all(isinstance(host, str) and host for host, _ in pairs):
        raise not_found("the answer has no addresses")
    return [join_host_port(*pair) for pair in pairs]


def locate_tpu(
    tpu: str | Sequence[str] | None,
    zone: str | None,
    project: str | None,
    credentials: Any,
    service: Any,
    discovery_url: str | None,
) -> AddressSource | None:
    """Return the source for the arguments of `TPUClusterResolver`; None if local."""
    name = _single_name(tpu)
    if not name and os.environ.get(GKE_ENDPOINTS):
        return _listed(os.environ[GKE_ENDPOINTS], GKE_ENDPOINTS)
    name = name or os.environ.get(TPU_NAME)
    if not name:
        config = _tpu_config()
        name = config.get("tpu_node_name")
        project = project or config.get("project")
        zone = zone or config.get("zone")
    if not name and os.environ.get(TPU_WORKER_HOSTNAMES):
        return _listed(os.environ[TPU_WORKER_HOSTNAMES], TPU_WORKER_HOSTNAMES)
    if not name:
        return _this_machine(empty=tpu is not None)
    if name == "local":
        return None
    if name.startswith("grpc://"):
        return _listed(name, "`tpu`")
    url = os.environ.get(TPU_DISCOVERY_URL) or discovery_url or None
    if url and urlsplit(url).scheme.lower() != "https":
        is_ours = not os.environ.get(TPU_DISCOVERY_URL)
        source_name = "`discovery_url`" if is_ours else TPU_DISCOVERY_URL
        raise ValueError(
            f"Expected {source_name} to begin with https://. Received: {url!r}"
        )
    project = project or _from_metadata("project", "project/project-id", _PROJECT)
    zone = zone or _from_metadata("zone", "instance/zone", _ZONE)

    def make_service() -> Any:
        api = "tpu", credentials, "tpu", "TPUClusterResolver"
        return service or google_api.build_service(*api, url)

    return functools.partial(_node_addresses, name, project, zone, make_service)


def _single_name(tpu: str | Sequence[str] | None) -> str | None:
    if isinstance(tpu, (list, tuple)):
        if not tpu:
            raise ValueError("At least one TPU must be specified. Received: tpu=[]")
        if len(tpu) != 1:
            raise NotImplementedError(
                "Using multiple TPUs in a single session is not implemented. Expected "
                "one name, or the addresses of one TPU's hosts as one string "
                f'"grpc://host:port,grpc://host:port". Received: tpu={list(tpu)}'
            )
        tpu = tpu[0]
    if tpu is not None and not isinstance(tpu, str):
        raise TypeError(
            "Expected `tpu` to be a name, a gRPC address, 'local', a list of one of "
            f"these, or None. Received: {tpu!r}"
        )
    return tpu


def _tpu_config() -> dict[str, str]:
    text = os.environ.get(TPU_CONFIG)
    if not text:
        return {}
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict) or not all(
        isinstance(config.get(key, ""), str)
        for key in ("tpu_node_name", "project", "zone")
    ):
        raise ValueError(
            f"Expected the environment variable {TPU_CONFIG} to be a JSON object with "
            'the strings "tpu_node_name", "project" and "zone". Received: '
            f"{text[:200]!r}"
        )
    return config


def _listed(text: str, source_name: str) -> AddressSource:
    """Return the source of listed addresses, whose ports may be left out."""
    addresses = []
    for part in map(str.strip, text.split(",")):
        host, port = split_host_port(part.removeprefix("grpc://"))
        if not host or "/" in host:
            raise ValueError(
                f'Expected {source_name} to be addresses "grpc://host:port" separated '
                f"by commas. Received: {part!r}"
            )
        port = TPU_PORT if port is None else port
        number = port_number(port, f"the port in {source_name}")
        addresses.append(join_host_port(host, number))
    return functools.partial(list, addresses)


def _this_machine(empty: bool) -> AddressSource:
    """Return the TPU that this machine is a host of, or raise an error."""
    try:
        google_api.get_metadata("project/project-id" if empty else _ENDPOINTS)
    except google_api.MetadataError:
        raise ValueError(
            "Please provide a TPU name to connect to: an argument `tpu`, or one of the "
            f"environment variables {TPU_NAME}, {TPU_CONFIG} and {GKE_ENDPOINTS}. "
            "Received: none, and this machine is not a host of a TPU"
        ) from None
    if empty:
        raise RuntimeError(
            "Expected the name of a TPU: on Google Cloud it cannot be empty. "
            "Received: tpu=''. Pass tpu=None for the TPU of this machine"
        )
    return tpu_vm_addresses


def _from_metadata(argument: str, path: str, pattern: re.Pattern[str]) -> str:
    try:
        # The zone comes as projects/123/zones/us-central1-b.
        value = google_api.get_metadata(path).split("/")[-1]
    except google_api.MetadataError as error:
        raise RuntimeError(
            f"Expected `{argument}`, or a metadata server to ask for it. Received: "
            f"neither. {error}"
        ) from None
    if not pattern.fullmatch(value):
        raise RuntimeError(
            f"Expected the metadata server's {path} to be a {argument}. Received: "
            f"{value[:100]!r}; pass `{argument}`"
        )
    return value


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
        tpu: The name of the TPU, its hosts' addresses (`"grpc://10.0.0.1:8470"`,
            several separated by commas), `"local"`, or a list of one of these. `None`
            uses the first that is set of KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS, TPU_NAME,
            TPU_CONFIG and TPU_WORKER_HOSTNAMES, or else the metadata server.
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
        self._source = locate_tpu(
            tpu, zone, project, credentials, service, discovery_url
        )
        self._task_type = job_name
        self._coordinator_name = coordinator_name
        self._coordinator_address = coordinator_address
        self._hardware_feature: TPUHardwareFeature | None = None

    @staticmethod
    def connect(
        tpu: str | Sequence[str] | None = None,
        zone: str | None = None,
        project: str | None = None,
    ) -> TPUClusterResolver:
        """Return a resolver that has looked up the TPU.

        The backend initializes the TPU itself when it first uses it.

        Args:
            tpu: See `TPUClusterResolver`.
            zone: See `TPUClusterResolver`.
            project: See `TPUClusterResolver`.

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
        jobs = {str(self.task_type): self._source()}
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
        """Return the name of the leading task, on the first host."""
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
        return self._found_task_id if name == "task_id" else None

    @functools.cached_property
    def _found_task_id(self) -> int:
        """The index of this host in the TPU; 0 if it is not in it."""
        value = os.environ.get(TPU_WORKER_ID)
        if value:
            return as_int(value, TPU_WORKER_ID)
        if self._source is tpu_vm_addresses:
            number = google_api.get_metadata("instance/attributes/agent-worker-number")
            return as_int(number, "agent-worker-number of the metadata server")
        addresses = self._source() if self._source else []
        hosts = [split_host_port(address)[0] for address in addresses]
        return next((i for i, host in enumerate(hosts) if _is_local_address(host)), 0)


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
