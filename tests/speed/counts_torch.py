"""Counts of collectives, their bytes, and copies on torch, by wrapped functions."""

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from keras_strategy.backends.torch.collectives import TorchWorkers
from keras_strategy.backends.torch.state import Layout

_COLLECTIVES = "all_reduce", "broadcast", "all_to_all_single"


def count(train: Callable[[int], None], steps: int) -> tuple[int, int, int, int]:
    """Count collectives, their bytes, compilations and device copies."""
    # The collectives are calls of torch.distributed and sums over threads, and their
    # bytes those of this process, or of one thread. torch's CPUs are one device.
    collectives = data = copies = 0

    def count_collective(sent):
        nonlocal collectives, data
        collectives += 1
        data += sum(t.nbytes for t in sent if isinstance(t, torch.Tensor))

    def counting_collective(original):
        def counted(*args, **kwargs):
            # The first argument of an exchange is the output.
            is_in_place = original.__name__ != "all_to_all_single"
            values = [*args, *kwargs.values()]
            count_collective(values if is_in_place else values[1:])
            return original(*args, **kwargs)

        return counted

    def counting_sum(original):
        def counted(layout, name, tensors):  # one of each thread
            if len(tensors) > 1:
                count_collective(tensors[:1])
            return original(layout, name, tensors)

        return counted

    def counting_copy(original):
        def to(tensor, *args, **kwargs):
            nonlocal copies
            result = original(tensor, *args, **kwargs)
            copies += result.device != tensor.device
            return result

        return to

    with contextlib.ExitStack() as patches:
        for name in _COLLECTIVES:
            patches.enter_context(_wrapped(dist, name, counting_collective))
        gather = _wrapped(TorchWorkers, "start_gather", counting_collective)
        patches.enter_context(gather)
        patches.enter_context(_wrapped(Layout, "sum", counting_sum))
        patches.enter_context(_wrapped(torch.Tensor, "to", counting_copy))
        train(steps)
    return collectives, data, 0, copies


def _wrapped(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Any:
    return mock.patch.object(owner, name, wrap(getattr(owner, name)))
