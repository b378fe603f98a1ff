"""Subcommand `info`: versions, devices and cluster."""

import argparse
import json
import platform
import sys
from typing import Any

import keras
from rich.console import Console
from rich.markup import escape

import keras_strategy
from keras_strategy.cluster_resolver import detect
from keras_strategy.core.registry import get_engine
from keras_strategy.errors import UnsupportedBackendError

# Rows that `data` has in another form.
_TEXT_ONLY = {"devices", "cluster", "MirroredStrategy"}


def main(options: argparse.Namespace) -> int:
    if options.json:
        print(json.dumps(data(), indent=2))
        return 0
    console = Console(soft_wrap=True)
    for name, value in rows():
        console.print(f"[bold]{name:<18}[/]{escape(value)}", highlight=False)
    console.print("\nLooked for a cluster:", style="bold")
    console.print(escape(str(detect())), highlight=False)
    return 0


def data() -> dict[str, Any]:
    detection = detect()
    return {
        **{name: value for name, value in rows() if name not in _TEXT_ONLY},
        "devices": _devices()[0],
        "cluster": {
            "found": detection.chosen and detection.chosen.name,
            "says": _cluster(),
            "looked_for": str(detection).splitlines(),
        },
    }


def rows() -> list[tuple[str, str]]:
    backend = keras.backend.backend()
    version = getattr(sys.modules.get(backend), "__version__", "unknown")
    devices, shown = _devices()
    count = f"{len(devices)} replica{'s' * (len(devices) > 1)} in this process"
    return [
        ("keras_strategy", keras_strategy.__version__),
        ("python", platform.python_version()),
        ("keras", keras.__version__),
        ("backend", f"{backend} {version}"),
        ("devices", shown),
        ("MirroredStrategy", count),
        ("cluster", _cluster()),
    ]


def _devices() -> tuple[list[str], str]:
    """Return the devices that a strategy uses by default, and their description."""
    try:
        devices = list(get_engine().list_devices())
    except UnsupportedBackendError as error:
        return [], f"none: {error}"
    return devices, ", ".join(devices)


def _cluster() -> str:
    chosen = detect().chosen
    if chosen is None:
        return "none, this process is on its own"
    try:
        resolver = chosen.make_resolver()
        task = f"{resolver.task_type} {resolver.task_id}"
        return f"{chosen.name}: this is {task} of {resolver.cluster_spec().as_dict()}"
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        return f"{chosen.name}, which cannot be used: {error}"
