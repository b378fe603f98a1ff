"""`KubernetesClusterResolver`: the pods that match a label selector."""

import enum
import functools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from keras_strategy.cluster_resolver.base import ClusterResolver, import_extra
from keras_strategy.cluster_resolver.cluster_spec import (
    ClusterSpec,
    join_host_port,
    port_number,
)

_CONNECT_AND_READ_SECONDS = (3.0, 5.0)
_INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"

_NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
_RBAC_RULE = '{apiGroups: [""], resources: ["pods"], verbs: ["list"]}'


class KubernetesExecutableLocation(enum.Enum):
    """Place of this program, which determines how it reaches the Kubernetes API.

    `WITHIN_CLUSTER` is a pod of the cluster, with its service account;
    `OFF_CLUSTER` is any other machine, with its kubeconfig file.

    Example:
    ```python
    from keras_strategy.cluster_resolver import KubernetesExecutableLocation

    assert KubernetesExecutableLocation.WITHIN_CLUSTER.value == 0
    ```
    """

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


class KubernetesClusterResolver(ClusterResolver):
    """Cluster of the pods of each job, from the Kubernetes API.

    A task's address is its pod's IP address. The pods of one selector are sorted
    by their completion index, if they belong to an Indexed Job, and else by
    name. The API does not report which pod this one is: set `task_type` and
    `task_id`, in an Indexed Job from the variable JOB_COMPLETION_INDEX. Needs the
    extra `kubernetes`, unless you pass an `override_client`.

    In a pod it lists the pods of its own namespace; elsewhere, or with an
    `override_client`, those of all namespaces. The service account needs a Role, or a
    ClusterRole for all namespaces, and its binding, with the rule
    `{apiGroups: [""], resources: ["pods"], verbs: ["list"]}`. Of pods with the same
    completion index, the newest counts.

    Args:
        job_to_label_mapping: A dict from job name to a list of label selectors.
            Defaults to `{"worker": ["job-name=tensorflow"]}`.
        tf_server_port: The port that every task listens on.
        rpc_layer: The protocol between tasks.
        override_client: A `kubernetes.client.CoreV1Api` to use. You then load
            its configuration yourself.
        executable_location: Where this program runs.

    Raises:
        ImportError: If the extra `kubernetes` is not installed and there is no
            `override_client`.
        RuntimeError: If there is no configuration for this location.
        ValueError: If an argument is invalid.

    Example:
    ```python
    from kubernetes import client

    from keras_strategy.cluster_resolver import KubernetesClusterResolver

    resolver = KubernetesClusterResolver(
        {"worker": ["job-name=train"]},
        override_client=client.CoreV1Api())  # leave out in a pod
    resolver.task_type, resolver.task_id = "worker", 0
    ```
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: KubernetesExecutableLocation = (
            KubernetesExecutableLocation.WITHIN_CLUSTER
        ),
    ) -> None:
        self._selectors = dict(
            job_to_label_mapping or {"worker": ["job-name=tensorflow"]}
        )
        for job_name, selectors in self._selectors.items():
            # A string would act as a list of one-letter selectors.
            if isinstance(selectors, str):
                raise ValueError(
                    "Expected `job_to_label_mapping` to map each job to a list of "
                    f"selectors. Received: {selectors!r} for {job_name!r}"
                )
        self._port = port_number(tf_server_port, "`tf_server_port`")
        self._rpc_layer = rpc_layer
        self._client = override_client or _make_client(executable_location)
        within = executable_location is KubernetesExecutableLocation.WITHIN_CLUSTER
        file = pathlib.Path(_NAMESPACE_FILE)
        # Another client may have another service account, and see all namespaces.
        is_pod = within and not override_client and file.exists()
        self._namespace = file.read_text().strip() if is_pod else ""

    def cluster_spec(self) -> ClusterSpec:
        """Return the current pods.

        Raises:
            RuntimeError: If the API cannot be queried, a selector matches no pod,
                or a pod is not running.
        """
        pods = {
            job_name: [pod for selector in selectors for pod in self._pods(selector)]
            for job_name, selectors in self._selectors.items()
        }
        waiting = [
            f'pod "{pod.metadata.name}" is not running; phase: "{pod.status.phase}"'
            for job_pods in pods.values()
            for pod in job_pods
            if pod.status.phase != "Running"
        ]
        if waiting:
            raise RuntimeError(
                "Expected every pod of the cluster to be running. Received: "
                + ", ".join(waiting)
            )
        return ClusterSpec(
            {
                job_name: [join_host_port(_find_ip(pod), self._port) for pod in found]
                for job_name, found in pods.items()
            }
        )

    def _pods(self, selector: str) -> list[Any]:
        list_pods = self._client.list_pod_for_all_namespaces
        if self._namespace:
            list_pods = functools.partial(
                self._client.list_namespaced_pod, self._namespace
            )
        try:
            found = list_pods(
                label_selector=selector, _request_timeout=_CONNECT_AND_READ_SECONDS
            ).items
        except Exception as error:
            # The client's own text quotes the server.
            status = getattr(error, "status", None)
            if status in (401, 403):
                raise RuntimeError(
                    f"The Kubernetes API refused to list the pods of {selector!r} "
                    f"(HTTP {status}). The service account needs a Role (for all "
                    f"namespaces a ClusterRole) with the rule {_RBAC_RULE}, and its "
                    "binding"
                ) from None
            detail = f"HTTP {status}" if status else type(error).__name__
            raise RuntimeError(
                f"Could not query the Kubernetes API for the pods of {selector!r}: "
                f"{detail}. Check that it can be reached from this machine, and the "
                "selector"
            ) from None
        if not found:
            raise RuntimeError(
                "Expected `job_to_label_mapping` to have selectors of running pods. "
                f"Received: {selector!r}, which matches none"
            )
        # A Job keeps its failed pods beside those that replace them.
        found.sort(key=lambda pod: str(pod.metadata.creation_timestamp))
        newest = {_identity(pod): pod for pod in found}
        return [newest[identity] for identity in sorted(newest)]


def _make_client(location: KubernetesExecutableLocation) -> Any:
    if not isinstance(location, KubernetesExecutableLocation):
        raise ValueError(
            "Expected `executable_location` to be a KubernetesExecutableLocation. "
            f"Received: {location!r}"
        )
    user = "kubernetes", "KubernetesClusterResolver"
    config = import_extra("kubernetes.config", *user)
    client = import_extra("kubernetes.client", *user)
    configuration = client.Configuration()
    try:
        if location is KubernetesExecutableLocation.WITHIN_CLUSTER:
            config.load_incluster_config(client_configuration=configuration)
        else:
            config.load_kube_config(
                config_file=os.environ.get("KUBECONFIG") or None,
                client_configuration=configuration,
            )
    except Exception as error:
        # The error of a file that is not YAML quotes it, with the token in it.
        is_safe = isinstance(error, config.ConfigException)
        reason = str(error) if is_safe else type(error).__name__
        raise RuntimeError(
            f"Expected a Kubernetes configuration for {location}; pass "
            "`executable_location` WITHIN_CLUSTER in a pod and OFF_CLUSTER elsewhere, "
            f"where KUBECONFIG names the file. Received: {reason}"
        ) from None
    # The default of three retries would multiply the time limit by four.
    configuration.retries = 1
    return client.CoreV1Api(client.ApiClient(configuration))


def _identity(pod: Any) -> tuple[bool, int, str, str]:
    """Return what a pod and those that replace it share, in the order of the tasks."""
    name, space = pod.metadata.name, getattr(pod.metadata, "namespace", None) or ""
    annotations = getattr(pod.metadata, "annotations", None) or {}
    index = annotations.get(_INDEX_ANNOTATION)
    # By number: by name, pod 10 would come before pod 2.
    if isinstance(index, str) and index.isascii() and index.isdecimal():
        return False, int(index), name.rpartition("-")[0], space
    return True, 0, name, space


def _find_ip(pod: Any) -> str:
    # tf.distribute uses the node's address (host_ip), where nothing listens unless the
    # pod uses the node's network; then both are the same.
    address = pod.status.pod_ip or pod.status.host_ip
    if not address:
        raise RuntimeError(
            "Expected a running pod to have an address. Received: pod "
            f'"{pod.metadata.name}" without one'
        )
    return address
