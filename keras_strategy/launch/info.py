"""What `keras-strategy info` shows."""

import platform
import sys

import keras

import keras_strategy
from keras_strategy.cluster_resolver import detect
from keras_strategy.core.registry import get_engine
from keras_strategy.errors import UnsupportedBackendError


def text() -> str:
    """Versions, devices and the cluster that this process's environment tells of."""
    backend = keras.backend.backend()
    engine = getattr(sys.modules.get(backend), "__version__", "unknown")
    rows = [
        ("keras_strategy", keras_strategy.__version__),
        ("python", platform.python_version()),
        ("keras", keras.__version__),
        ("backend", f"{backend} {engine}"),
        ("devices", _devices()),
        ("cluster", _cluster()),
    ]
    lines = [f"{name:<16}{value}" for name, value in rows]
    return "\n".join([*lines, "", "Looked for a cluster:", str(detect())])


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
