"""Versions, devices and cluster that `keras-strategy info` shows."""

import platform
import sys
from typing import Any

import keras

import keras_strategy
from keras_strategy.cluster_resolver import detect
from keras_strategy.core.registry import get_engine
from keras_strategy.errors import UnsupportedBackendError

# Rows that `data` has in another form.
_TEXT_ONLY = {"devices", "cluster", "MirroredStrategy"}


def data() -> dict[str, Any]:
    """Return everything as JSON values."""
    detection = detect()
    return {
        **{name: value for name, value in rows() if name not in _TEXT_ONLY},
        "devices": _default_devices(),
        "cluster": {
            "found": detection.chosen and detection.chosen.name,
            "says": _cluster(),
            "looked_for": str(detection).splitlines(),
        },
    }


def rows() -> list[tuple[str, str]]:
    """Return the versions, devices and cluster of this process."""
    backend, replicas = keras.backend.backend(), len(_default_devices())
    version = getattr(sys.modules.get(backend), "__version__", "unknown")
    return [
        ("keras_strategy", keras_strategy.__version__),
        ("python", platform.python_version()),
        ("keras", keras.__version__),
        ("backend", f"{backend} {version}"),
        ("devices", _devices()),
        (
            "MirroredStrategy",
            f"{replicas} replica{'s' * (replicas > 1)} in this process",
        ),
        ("cluster", _cluster()),
    ]


def detection_report() -> str:
    """Return each kind of cluster, and why this process belongs to it or not."""
    return str(detect())


def _default_devices() -> list[str]:
    """Return the devices that a strategy uses by default."""
    try:
        return list(get_engine().list_devices())
    except UnsupportedBackendError:
        return []


def _devices() -> str:
    try:
        return ", ".join(get_engine().list_devices())
    except UnsupportedBackendError as error:
        return f"none: {error}"


def _cluster() -> str:
    detection = detect()
    if detection.chosen is None:
        return "none, this process is on its own"
    name = detection.chosen.name
    try:
        resolver = detection.resolver()
        assert resolver is not None
        task = f"{resolver.task_type} {resolver.task_id}"
        return f"{name}: this is {task} of {resolver.cluster_spec().as_dict()}"
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        return f"{name}, which cannot be used: {error}"
