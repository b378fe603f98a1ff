"""Devices of this process, as the active backend lists them."""

from __future__ import annotations

import importlib
import re

_DEVICE_NAME = re.compile(r"([a-z]+):\d+")


def local_device_kinds() -> list[str]:
    """Return the kind of each device of this process: "CPU", "GPU" or "TPU".

    The backend is imported only here: a query of the cluster must not start one.
    """
    registry = importlib.import_module("keras_strategy.core.registry")
    kinds = []
    for name in registry.get_engine().list_devices():
        match = _DEVICE_NAME.fullmatch(name)
        if match is None:
            raise ValueError(
                'Expected the backend to name its devices like "gpu:0". Received: '
                f"{name!r}"
            )
        kinds.append(match.group(1).upper())
    return kinds
