"""The devices of this process, which a room above knows how to list."""

from __future__ import annotations

import re
from collections.abc import Callable

_DEVICE_NAME = re.compile(r"([a-z]+):\d+")
_list_devices: Callable[[], list[str]] | None = None


def list_with(list_devices: Callable[[], list[str]]) -> None:
    """Sets the function that lists this process's devices, such as `"gpu:0"`.

    It is called when a resolver is asked for devices and not before: to ask who is in
    the cluster must not start a backend.
    """
    global _list_devices
    _list_devices = list_devices


def local_device_kinds() -> list[str]:
    """The kind of each device of this process: "CPU", "GPU" or "TPU"."""
    assert _list_devices is not None, "the adapters register themselves on import"
    kinds = []
    for name in _list_devices():
        match = _DEVICE_NAME.fullmatch(name)
        if match is None:
            raise ValueError(
                'Expected the backend to name its devices like "gpu:0". Received: '
                f"{name!r}"
            )
        kinds.append(match.group(1).upper())
    return kinds
