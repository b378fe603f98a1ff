"""Choice of the TPU from the arguments, or else from the environment."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from keras_strategy.cluster_resolver.checks import join_host_port, port_number
from keras_strategy.cluster_resolver.google import metadata
from keras_strategy.cluster_resolver.google.tpu_source import (
    TPU_PORT,
    TPUVM,
    TPUAddresses,
    TPUNode,
    TPUSource,
)

GKE_ENDPOINTS = "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS"
TPU_NAME = "TPU_NAME"
TPU_CONFIG = "TPU_CONFIG"
TPU_WORKER_HOSTNAMES = "TPU_WORKER_HOSTNAMES"
TPU_DISCOVERY_URL = "TPU_API_DISCOVERY_URL"

_ZONE = re.compile(r"[a-z0-9-]+")
_PROJECT = re.compile(r"[a-z0-9.:-]+")


def locate_tpu(
    tpu: str | Sequence[str] | None,
    zone: str | None,
    project: str | None,
    credentials: Any,
    service: Any,
    discovery_url: str | None,
) -> TPUSource | None:
    """Return the source for the arguments of `TPUClusterResolver`; None if local."""
    name = _single_name(tpu)
    if not name and os.environ.get(GKE_ENDPOINTS):
        return TPUAddresses(_endpoints(os.environ[GKE_ENDPOINTS], GKE_ENDPOINTS))
    name = name or os.environ.get(TPU_NAME)
    if not name:
        config = _tpu_config()
        name = config.get("tpu_node_name")
        project = project or config.get("project")
        zone = zone or config.get("zone")
    if not name and os.environ.get(TPU_WORKER_HOSTNAMES):
        return TPUAddresses(
            _endpoints(os.environ[TPU_WORKER_HOSTNAMES], TPU_WORKER_HOSTNAMES)
        )
    if not name:
        return _this_machine(empty=tpu is not None)
    if name == "local":
        return None
    if name.startswith("grpc://"):
        return TPUAddresses(_endpoints(name, "`tpu`"))
    url = _checked_discovery_url(discovery_url)
    return TPUNode(
        name,
        project or _from_metadata("project", "project/project-id", _PROJECT),
        zone or _from_metadata("zone", "instance/zone", _ZONE),
        credentials,
        service,
        url,
    )


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


def _endpoints(text: str, source_name: str) -> tuple[str, ...]:
    return tuple(_endpoint(part.strip(), source_name) for part in text.split(","))


def _endpoint(text: str, source_name: str) -> str:
    address = text.removeprefix("grpc://")
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]") or (":" in host and not host.endswith("]")):
        host, port = address, str(TPU_PORT)
    if not host or "/" in host:
        raise ValueError(
            f'Expected {source_name} to be addresses "grpc://host:port" separated by '
            f"commas. Received: {text!r}"
        )
    return join_host_port(host, port_number(port, f"the port in {source_name}"))


def _this_machine(empty: bool) -> TPUSource:
    """Return the TPU that this machine is a host of, or raise an error."""
    if empty and metadata.get_metadata_or_none("project/project-id") is not None:
        raise RuntimeError(
            "Expected the name of a TPU: on Google Cloud it cannot be empty. "
            "Received: tpu=''. Pass tpu=None for the TPU of this machine"
        )
    endpoints = "instance/attributes/worker-network-endpoints"
    if not empty and metadata.get_metadata_or_none(endpoints) is not None:
        return TPUVM()
    raise ValueError(
        "Please provide a TPU name to connect to: an argument `tpu`, or one of the "
        f"environment variables {TPU_NAME}, {TPU_CONFIG} and {GKE_ENDPOINTS}. "
        "Received: none, and this machine is not a host of a TPU"
    )


def _from_metadata(argument: str, path: str, pattern: re.Pattern[str]) -> str:
    try:
        # The zone comes as projects/123/zones/us-central1-b.
        value = metadata.get_metadata(path).split("/")[-1]
    except metadata.MetadataError as error:
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


def _checked_discovery_url(argument: str | None) -> str | None:
    from_environment = os.environ.get(TPU_DISCOVERY_URL)
    url = from_environment or argument
    if url and urlsplit(url).scheme.lower() != "https":
        source_name = TPU_DISCOVERY_URL if from_environment else "`discovery_url`"
        raise ValueError(
            f"Expected {source_name} to begin with https://. Received: {url!r}"
        )
    return url or None
