"""torch's devices, logical CPUs, and the conversion of NumPy arrays.

torch has one CPU device with all cores. A logical CPU is a name for one more thread on
it: replicas on several of them share the cores.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import torch

from keras_strategy.backends.single import arrays_to_tensors
from keras_strategy.values import is_numeric_array, map_leaves

_logical_cpus = 1
_in_use = False


def list_devices(device_type: str | None = None) -> list[str]:
    """Return the canonical names of the devices of a type."""
    counts = {
        "gpu": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "cpu": _logical_cpus,
    }
    if device_type is None:
        device_type = "gpu" if counts["gpu"] else "cpu"
    kind = device_type.lower()
    return [f"{kind}:{index}" for index in range(counts.get(kind, 0))]


def set_logical_cpus(count: int) -> None:
    """Set the number of logical CPUs, before a strategy is created."""
    global _logical_cpus
    if count == _logical_cpus:
        return
    if _in_use:
        raise RuntimeError(
            "set_logical_devices must be called before a strategy is created. There "
            f"are {_logical_cpus} logical CPU devices now; received {count}. Call it "
            "at the start of the program, or restart the notebook's kernel."
        )
    _logical_cpus = count


def use() -> None:
    """Record that a strategy uses devices, so that their number is final."""
    global _in_use
    _in_use = True


def torch_device(name: str) -> str:
    """Return torch's name for a canonical device name."""
    kind, index = name.split(":")
    # torch would copy a tensor from "cpu" to "cpu:1", and a copy of a Parameter
    # has no gradient.
    return "cpu" if kind == "cpu" else f"cuda:{index}"


def array_converter(devices: Sequence[str]) -> Callable[[Any], Any]:
    """Return the `arrays_to_tensors` for replicas on devices with torch's names."""
    if set(devices) == {"cpu"}:
        return functools.partial(map_leaves, cpu_tensor)
    return arrays_to_tensors


def cpu_tensor(leaf: Any) -> Any:
    """Convert a numeric array to a new tensor, faster than Keras does.

    For the rows of a small batch Keras's checks take longer than the copy.
    """
    if type(leaf) is np.ndarray and _keeps_dtype(leaf.dtype):
        # A copy, as Keras makes, since a step may write to it.
        return torch.from_numpy(np.array(leaf))
    return keras.ops.convert_to_tensor(leaf) if is_numeric_array(leaf) else leaf


@functools.cache
def _keeps_dtype(dtype: np.dtype) -> bool:
    """Return True if Keras converts an array of this dtype to a tensor of it."""
    if dtype.kind not in "biufc":
        return False
    tensor = keras.ops.convert_to_tensor(np.zeros(1, dtype))
    return tensor.dtype == getattr(torch, dtype.name, None)
