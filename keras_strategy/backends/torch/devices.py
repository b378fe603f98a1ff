"""The devices that torch has, and logical CPUs, which it has not.

To torch all CPU cores are one device. A logical CPU is a name for one more thread on
it: replicas on several of them share the cores.

Tensors of NumPy's arrays, as Keras makes them, in less time.

A step of `fit` makes them of the rows of each array. Keras asks many things first,
which takes longer than to copy the rows of a small batch.
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


def array_converter(devices: Sequence[str]) -> Callable[[Any], Any]:
    """What `arrays_to_tensors` is where all replicas are on some devices.

    Args:
        devices: The devices, as torch calls them.
    """
    if set(devices) == {"cpu"}:
        return functools.partial(map_leaves, cpu_tensor)
    return arrays_to_tensors


def cpu_tensor(leaf: Any) -> Any:
    """A new tensor of an array of numbers, and anything else as it is."""
    if type(leaf) is np.ndarray and _is_taken_as_it_is(leaf.dtype):
        # A copy, as Keras's is: a step may write to it.
        return torch.from_numpy(np.array(leaf))
    return keras.ops.convert_to_tensor(leaf) if is_numeric_array(leaf) else leaf


@functools.cache
def _is_taken_as_it_is(dtype: np.dtype) -> bool:
    """Whether Keras makes of an array of this dtype a tensor of the same one."""
    if dtype.kind not in "biufc":
        return False
    tensor = keras.ops.convert_to_tensor(np.zeros(1, dtype))
    return tensor.dtype == getattr(torch, dtype.name, None)
