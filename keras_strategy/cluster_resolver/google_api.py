"""Google Cloud's API client and metadata server, and `GCEClusterResolver`.

All requests have time limits, and no error shows what a server sent.
"""

import contextlib
import http.client
import os
import time
from typing import Any
from urllib.parse import urlsplit

from keras_strategy.cluster_resolver.base import ClusterResolver, import_extra
from keras_strategy.cluster_resolver.cluster_spec import (
    ClusterSpec,
    join_host_port,
    port_number,
)

_API_TIMEOUT_SECONDS = 5.0
_METADATA_TIMEOUT_SECONDS = 3.0
_MAX_BYTES = 1 << 20


def build_service(
    name: str, credentials: Any, extra: str, user: str, discovery_url: str | None = None
) -> Any:
    """Make the client of an API; `extra` installs its library for `user`."""
    discovery = import_extra("googleapiclient.discovery", extra, user)
    if credentials is None or credentials == "default":
        google_auth = import_extra("google.auth", extra, user)
        credentials, _ = google_auth.default(
            scopes=["https://www.googleapis.com/auth/cloud-platform"]
        )
    httplib2 = import_extra("httplib2", extra, user)
    google_auth_httplib2 = import_extra("google_auth_httplib2", extra, user)

    class HttpsOnly(google_auth_httplib2.AuthorizedHttp):
        """Connection that refuses plain http, which a discovery document may name."""

        def request(self, uri: str, *args: Any, **kwargs: Any) -> Any:
            if not uri.lower().startswith("https://"):
                raise ValueError("Expected the address of the API to be https.")
            return super().request(uri, *args, **kwargs)

    # The library's default is a minute.
    http = httplib2.Http(timeout=_API_TIMEOUT_SECONDS)
    # A redirect could lead out of https.
    http.follow_redirects = False
    options = {} if discovery_url is None else {"discoveryServiceUrl": discovery_url}
    return discovery.build(
        name,
        "v1",
        http=HttpsOnly(credentials, http=http),
        cache_discovery=False,
        num_retries=0,
        **options,
    )


def summarize(error: BaseException) -> str:
    """Return an error without the library's text, which may contain keys."""
    kind = type(error).__name__
    status = getattr(getattr(error, "resp", None), "status", None)
    if status is not None:
        return f"{kind}: HTTP {status}"
    if isinstance(error, OSError):
        return f"{kind}: {error}"
    return kind


class MetadataError(RuntimeError):
    """Missing or invalid answer of the metadata server."""


def get_metadata(path: str) -> str:
    """Return the text at a path below `/computeMetadata/v1/`."""
    # In the order of Google's own clients.
    host = (
        os.environ.get("GCE_METADATA_HOST")
        or os.environ.get("GCE_METADATA_IP")
        or "metadata.google.internal"
    )
    flavor = {"Metadata-Flavor": "Google"}
    try:
        # Without proxies and redirects: only this machine's own server can answer.
        place = urlsplit(f"//{host}").netloc
        connection = http.client.HTTPConnection(
            place, timeout=_METADATA_TIMEOUT_SECONDS
        )
        with contextlib.closing(connection):
            connection.request("GET", f"/computeMetadata/v1/{path}", headers=flavor)
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise MetadataError(
                    f"The Google Cloud metadata server at {host} answered HTTP "
                    f"{response.status} for {path}"
                )
            if response.headers.get("Metadata-Flavor") != "Google":
                raise MetadataError(
                    f"Expected the Google Cloud metadata server at {host}. Received "
                    "an answer without its header Metadata-Flavor; set "
                    "GCE_METADATA_HOST if it is elsewhere"
                )
            # One time limit for all of the body.
            deadline = time.monotonic() + _METADATA_TIMEOUT_SECONDS
            body = b""
            while chunk := response.read1(_MAX_BYTES):
                body += chunk
                if len(body) > _MAX_BYTES:
                    raise ValueError("the answer is too long")
                if time.monotonic() > deadline:
                    raise TimeoutError("timed out")
        return body.decode("utf-8").strip()
    except UnicodeDecodeError:
        raise MetadataError(
            f"The Google Cloud metadata server at {host} did not answer with text for "
            f"{path}"
        ) from None
    # HTTPException: not HTTP at all. ValueError: the host is invalid.
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise MetadataError(
            f"No Google Cloud metadata server at {host} ({error}); is this a Google "
            "Cloud machine?"
        ) from None


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
        ImportError: If the extra `gce` is not installed and there is no `service`.

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
            "compute", credentials, "gce", "GCEClusterResolver"
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
