"""Tensors of NumPy's arrays, as Keras makes them, in less time.

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
from keras_strategy.values.distributed import is_numeric_array, map_leaves


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
