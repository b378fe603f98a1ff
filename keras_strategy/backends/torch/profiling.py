"""Counts and timings of collectives and copies while a program trains."""

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from keras_strategy.backends.torch.collectives import TorchWorkers
from keras_strategy.backends.torch.state import Layout
from keras_strategy.training.reduction import compute_and_comm_fractions

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


# The names of collectives in torch's profiler, and of sums over threads.
_SUMS = "keras_strategy::sum"
_COLLECTIVE_EVENTS = ("c10d::", "gloo:", "nccl:", "ncclDevKernel", "mpi:", _SUMS)


def shares(train: Callable[[int], None], steps: int) -> tuple[float, float] | None:
    """Return the fractions of time spent in computation and in collectives."""
    # On GPUs they are those of this process's kernels; on CPUs, those of torch's
    # operations in any thread, since replicas of one process take turns.
    activities = [torch.profiler.ProfilerActivity.CPU]
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiling: Any = torch.profiler
    everywhere = profiling._ExperimentalConfig(profile_all_threads=True)
    profiler = profiling.profile(activities=activities, experimental_config=everywhere)
    named = torch.profiler.record_function(_SUMS)
    with _wrapped(Layout, "sum", named), profiler:
        train(steps)
    events: Any = profiler.events()
    wanted = "CUDA" if on_gpus else "CPU"
    return compute_and_comm_fractions(
        (event.time_range.start, event.time_range.end, _is_collective(event))
        for event in events
        if event.device_type.name == wanted
        and event.time_range.end > event.time_range.start
    )


def _is_collective(event: Any) -> bool:
    """Return True for a collective or a part of one."""
    while event is not None:
        if event.name.startswith(_COLLECTIVE_EVENTS):
            return True
        event = event.cpu_parent
    return False


def _wrapped(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Any:
    return mock.patch.object(owner, name, wrap(getattr(owner, name)))
