"""What torch did while a program trained: counted where values leave a replica."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from keras_strategy.backends.torch.replica import TorchReplica

_COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor")


def count(train: Callable[[int], None], steps: int) -> tuple[int, int, int, int]:
    """Counts what happens in some steps.

    Args:
        train: Trains for so many steps.
        steps: The number of steps.

    Returns:
        The collectives: calls of torch.distributed, and sums over the threads of one
        process. The bytes that this process, or one of the threads, gave to them. The
        compilations, which are 0: torch runs a step as it is written. The copies
        between devices: on CPUs none, since an array of NumPy's is a tensor as it is,
        and all logical CPUs are one device to torch.
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


@contextlib.contextmanager
def _counting(owner: Any, name: str, seen: list[int]) -> Iterator[None]:
    original = getattr(owner, name)

    def counted(*args, **kwargs):
        given = [*args, *kwargs.values()]
        if owner is TorchReplica:  # (self, one tensor of each thread)
            if len(args[1]) == 1:
                return original(*args, **kwargs)
            given = args[1][:1]
        elif name.startswith("all_gather"):
            given = given[1:]  # the first is where the others' come to
        seen[0] += 1
        seen[1] += sum(t.nbytes for t in given if isinstance(t, torch.Tensor))
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

    original = torch.Tensor.to
    torch.Tensor.to = to
    try:
        yield
    finally:
        del torch.Tensor.to  # it is the base class's
