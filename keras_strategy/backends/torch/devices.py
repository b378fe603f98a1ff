"""The devices that torch has, and logical CPUs, which it has not.

To torch all CPU cores are one device. A logical CPU is a name for one more thread on
it: replicas on several of them share the cores.
"""

import torch

_logical_cpus = 1
_in_use = False


def list_devices(device_type: str | None = None) -> list[str]:
    """See `core.engine.Engine.list_devices`."""
    counts = {
        "gpu": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "cpu": _logical_cpus,
    }
    if device_type is None:
        device_type = "gpu" if counts["gpu"] else "cpu"
    kind = device_type.lower()
    return [f"{kind}:{index}" for index in range(counts.get(kind, 0))]


def set_logical_cpus(count: int) -> None:
    """See `core.engine.Engine.set_logical_devices`."""
    global _logical_cpus
    if count == _logical_cpus:
        return
    if _in_use:
        raise RuntimeError(
            "set_logical_devices must be called before a strategy is made; there "
            f"are {_logical_cpus} logical CPU devices now, and {count} were asked "
            "for. Call it at the start of the program, or restart the notebook's "
            "kernel."
        )
    _logical_cpus = count


def use() -> None:
    """Notes that a strategy has taken devices: their number is final."""
    global _in_use
    _in_use = True


def torch_device(name: str) -> str:
    """Returns torch's name for a canonical device name."""
    kind, index = name.split(":")
    # torch would copy a tensor from "cpu" to "cpu:1", and a copy of a Parameter
    # has no gradient.
    return "cpu" if kind == "cpu" else f"cuda:{index}"
