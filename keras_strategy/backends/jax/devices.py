"""JAX devices under their canonical names."""

from collections.abc import Iterable
from typing import Any

import jax


def list_devices(device_type: str | None = None) -> list[str]:
    """Return the canonical names of the local devices of a kind; empty if none.

    Args:
        device_type: "cpu", "gpu" or "tpu"; None means the accelerators, or the CPUs if
            there are none.
    """
    kind = (device_type or jax.default_backend()).lower()
    try:
        devices = jax.local_devices(backend=kind)
    except RuntimeError:  # JAX has no devices of that kind
        return []
    # Not the device's id, which counts the devices of all processes.
    return [f"{_kind_of(device)}:{i}" for i, device in enumerate(devices)]


def tpu_coordinates() -> list[tuple[int, int, int, int]]:
    """Return the mesh coordinates of the local TPU devices: x, y, z and core."""
    try:
        devices: list[Any] = jax.local_devices(backend="tpu")
    except RuntimeError:
        return []
    return [(*device.coords, device.core_on_chip) for device in devices]


def device_named(name: str) -> Any:
    """Return the local device with a canonical name."""
    kind, _, index = name.partition(":")
    devices = jax.local_devices(backend=kind)
    if int(index) < len(devices):
        return devices[int(index)]
    raise ValueError(
        f"There is no device '{name}'. Available devices: {list_devices(kind)}"
    )


def name_of(device: Any) -> str:
    """Return the canonical name of a local device."""
    kind = _kind_of(device)
    return f"{kind}:{jax.local_devices(backend=kind).index(device)}"


def devices_of_worker(rank: int, names: Iterable[str]) -> list[Any]:
    """Return the devices of a worker with these canonical names."""
    devices = []
    for name in names:
        kind, _, index = name.partition(":")
        candidates = [d for d in jax.devices(kind) if d.process_index == rank]
        devices.append(candidates[int(index)])
    return devices


def set_logical_devices(count: int) -> None:
    """Split the CPU into `count` devices before JAX initializes its devices.

    Raises:
        RuntimeError: If JAX is initialized with a different number.
    """
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        current = len(list_devices("cpu"))
        if current == count:
            return
        raise RuntimeError(
            f"The CPU cannot be split into {count} logical devices, because JAX is "
            f"already initialized with {current}. Call set_logical_devices before "
            "you create the first tensor, variable or strategy (in a notebook, restart "
            "the kernel), or set the environment variable "
            f"KERAS_STRATEGY_LOGICAL_CPUS={count} before Python starts."
        ) from error


def _kind_of(device: Any) -> str:
    platform = str(device.platform)
    return {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
