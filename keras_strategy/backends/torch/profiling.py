"""Counts and timings of collectives and copies while a program trains."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from keras_strategy.backends.torch.replica import TorchReplica
from keras_strategy.training.reduction import compute_and_comm_fractions

_COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "all_to_all_single",
)


def count(train: Callable[[int], None], steps: int) -> tuple[int, int, int, int]:
    """Count collectives, their bytes, compilations and device copies.

    Returns:
        The collectives are calls of torch.distributed and sums over threads, and their
        bytes those of this process, or of one thread. Compilations are 0. Copies
        between devices are 0 on CPUs, which are one device for torch.
    """
    seen = [0, 0, 0]
    with contextlib.ExitStack() as patches:
        for name in _COLLECTIVES:
            patches.enter_context(_counting(dist, name, seen))
        patches.enter_context(_counting(TorchReplica, "add", seen))
        patches.enter_context(_counting_copies(seen))
        train(steps)
    collectives, data, copies = seen
    return collectives, data, 0, copies


# The names of collectives in torch's profiler, and of sums over threads.
_ADDS = "keras_strategy::add"
_COLLECTIVE_EVENTS = ("c10d::", "gloo:", "nccl:", "ncclDevKernel", "mpi:", _ADDS)


def shares(train: Callable[[int], None], steps: int) -> tuple[float, float] | None:
    """Return the fractions of time spent in computation and in collectives.

    On GPUs they are those of this process's kernels; on CPUs, those of torch's
    operations in any thread, since replicas of one process take turns.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiling: Any = torch.profiler
    everywhere = profiling._ExperimentalConfig(profile_all_threads=True)
    profiler = profiling.profile(activities=activities, experimental_config=everywhere)
    with _named(TorchReplica, "add", _ADDS), profiler:
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


@contextlib.contextmanager
def _named(owner: Any, name: str, event: str) -> Iterator[None]:
    """Context manager in which torch's profiler records calls of a function."""
    original = getattr(owner, name)

    def named(*args, **kwargs):
        with torch.profiler.record_function(event):
            return original(*args, **kwargs)

    setattr(owner, name, named)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def _counting(owner: Any, name: str, seen: list[int]) -> Iterator[None]:
    original = getattr(owner, name)

    def counted(*args, **kwargs):
        values = [*args, *kwargs.values()]
        if owner is TorchReplica:  # (self, one tensor of each thread)
            if len(args[1]) == 1:
                return original(*args, **kwargs)
            values = args[1][:1]
        elif name.startswith("all_gather") or name == "all_to_all_single":
            values = values[1:]  # the first one is the output
        seen[0] += 1
        seen[1] += sum(t.nbytes for t in values if isinstance(t, torch.Tensor))
        return original(*args, **kwargs)

    setattr(owner, name, counted)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def _counting_copies(seen: list[int]) -> Iterator[None]:
    def to(tensor, *args, **kwargs):
        result = original(tensor, *args, **kwargs)
        seen[2] += result.device != tensor.device
        return result

    tensor_class: Any = torch.Tensor
    original = tensor_class.to
    tensor_class.to = to
    try:
        yield
    finally:
        del tensor_class.to  # the base class defines it
