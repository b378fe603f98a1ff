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
from keras_strategy.cluster_resolver.detection import Finding, detect
from keras_strategy.commands.doctor import compare_versions
from keras_strategy.core.registry import get_engine
from keras_strategy.errors import UnsupportedBackendError


def main(options: argparse.Namespace) -> int:
    found = data()
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    devices, found["devices"] = _devices()
    count, cluster = len(devices), found.pop("cluster")
    if untested := found.pop("untested"):
        found["warning"] = f"not tested with {', '.join(untested)}"
    found["MirroredStrategy"] = f"{count} replica{'s' * (count > 1)} in this process"
    found["cluster"] = cluster["says"]
    console = Console(soft_wrap=True)
    for name, value in found.items():
        console.print(f"[bold]{name:<18}[/]{escape(value)}", highlight=False)
    console.print("\nLooked for a cluster:", style="bold")
    console.print(escape("\n".join(cluster["looked_for"])), highlight=False)
    return 0


def data() -> dict[str, Any]:
    backend, detection = keras.backend.backend(), detect()
    version = getattr(sys.modules.get(backend), "__version__", "unknown")
    tested, untested = compare_versions(keras.__version__, backend, version)
    return {
        "keras_strategy": keras_strategy.__version__,
        "python": platform.python_version(),
        "keras": keras.__version__,
        "backend": f"{backend} {version}",
        "tested": tested,
        "untested": untested,
        "devices": _devices()[0],
        "cluster": {
            "found": detection.chosen and detection.chosen.name,
            "says": _describe(detection.chosen),
            "looked_for": str(detection).splitlines(),
        },
    }


def _devices() -> tuple[list[str], str]:
    """Return the devices that a strategy uses by default, and their description."""
    try:
        devices = list(get_engine().list_devices())
    except UnsupportedBackendError as error:
        return [], f"none: {error}"
    return devices, ", ".join(devices)


def _describe(chosen: Finding | None) -> str:
    if chosen is None:
        return "none, this process is on its own"
    try:
        resolver = chosen.make_resolver()
        task = f"{resolver.task_type} {resolver.task_id}"
        return f"{chosen.name}: this is {task} of {resolver.cluster_spec().as_dict()}"
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        return f"{chosen.name}, which cannot be used: {error}"
