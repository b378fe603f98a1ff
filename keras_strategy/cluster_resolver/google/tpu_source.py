"""Sources of a TPU's host addresses: the caller, a metadata server, the TPU API."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from keras_strategy.cluster_resolver.checks import join_host_port, port_number
from keras_strategy.cluster_resolver.google import metadata
from keras_strategy.cluster_resolver.google.api import build_service, summarize

TPU_PORT = 8470


class TPUSource(Protocol):
    """Source of a TPU's hosts."""

    def addresses(self) -> list[str]:
        """Return `host:port` of every host, in the order of the tasks."""
        ...


@dataclasses.dataclass(frozen=True)
class TPUAddresses:
    """TPU whose addresses the caller or the environment lists."""

    endpoints: tuple[str, ...]

    def addresses(self) -> list[str]:
        """Return the listed addresses."""
        return list(self.endpoints)


@dataclasses.dataclass(frozen=True)
class TPUVM:
    """TPU of the TPU VM that this program runs on, from its metadata server."""

    def addresses(self) -> list[str]:
        """Return the hosts of this machine's slice."""
        text = metadata.get_metadata("instance/attributes/worker-network-endpoints")
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


@dataclasses.dataclass(frozen=True)
class TPUNode:
    """TPU with a name, from the TPU API."""

    name: str
    project: str
    zone: str
    # Not in the repr: they may contain keys.
    credentials: Any = dataclasses.field(repr=False)
    service: Any = dataclasses.field(repr=False)
    discovery_url: str | None

    def addresses(self) -> list[str]:
        """Return the current hosts of the node."""
        node = self._fetch()
        if node.get("state") != "READY":
            raise RuntimeError(
                f'TPU "{self.name}" is not yet ready; state: "{node.get("state")}". '
                'Expected the state "READY"'
            )
        endpoints = node.get("networkEndpoints", [node])
        try:
            addresses = [
                join_host_port(
                    _host(end["ipAddress"]), port_number(end["port"], "port")
                )
                for end in endpoints
            ]
        except (KeyError, TypeError, ValueError):
            addresses = []
        if not addresses:
            raise self._not_found("the answer has no addresses")
        return addresses

    def _fetch(self) -> dict[str, Any]:
        full_name = f"projects/{self.project}/locations/{self.zone}/nodes/{self.name}"
        try:
            # New each time, since an old connection times out.
            service = self.service or build_service(
                "tpu",
                "v1",
                self.credentials,
                "tpu",
                "TPUClusterResolver",
                self.discovery_url,
            )
            node = service.projects().locations().nodes().get(name=full_name).execute()
        except ImportError:
            raise
        except Exception as error:
            raise self._not_found(summarize(error)) from None
        if not isinstance(node, dict):
            raise self._not_found("the answer is not a node")
        return node

    def _not_found(self, reason: str) -> ValueError:
        return ValueError(
            f"Could not lookup TPU metadata from name '{self.name}' (project "
            f"'{self.project}', zone '{self.zone}'). Please doublecheck the tpu "
            f"argument in the TPUClusterResolver constructor. Exception: {reason}"
        )


def _host(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("not a host")
    return value
