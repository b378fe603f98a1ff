"""Memory of a model on torch, in each of several one-device processes.

See `benchmarks.memory`. The most that is alive is what torch's profiler counts of
tensors, from before the model is made; what is sent is counted at torch.distributed.
"""

import json
import os
import tempfile
import time
from typing import Any

from benchmarks.memory import Found, trained

# Functions of torch.distributed.
_KINDS = {"all_reduce": "all-reduce", "all_to_all_single": "all-to-all"}


def of_worker(width: int, shard: str | None) -> Found:
    """Trains two steps of one batch, and tells of the second.

    Args:
        width: Of the layers.
        shard: What is split.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.set_num_threads(1)
    _let_threads_free_memory()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as of_all:
        report, sent = trained(width, shard, count_what_is_sent)
    return Found(report.parameters[0], report.slots[0], _most_alive(of_all), sent)


def _let_threads_free_memory() -> None:
    """Wait after each collective, since the profiler misses what gloo frees later."""
    import torch.distributed as dist

    def waiting(function):
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            time.sleep(0.05)  # a loaded machine needs that long
            return result

        return call

    for name in _KINDS:
        setattr(dist, name, waiting(getattr(dist, name)))


def count_what_is_sent(least: int = 1000) -> dict[str, tuple[int, float]]:
    """Count collectives by kind, and the bytes that a worker sends, from now on.

    Args:
        least: The bytes of those that count.
    """
    import torch.distributed as dist

    from keras_strategy.backends.torch.collectives import TorchWorkers

    sent: dict[str, tuple[int, float]] = {}
    if not dist.is_initialized():
        return sent
    workers = dist.get_world_size()

    def note(kind: str, tensor: Any, times: float) -> None:
        if tensor.nbytes >= least:
            count, before = sent.get(kind, (0, 0.0))
            sent[kind] = count + 1, before + times * tensor.nbytes

    def counting(name: str, times: float) -> None:
        original = getattr(dist, name)

        def counted(tensor, *args, **kwargs):
            note(_KINDS[name], tensor, times)
            return original(tensor, *args, **kwargs)

        setattr(dist, name, counted)

    counting("all_reduce", 2 * (workers - 1) / workers)
    counting("all_to_all_single", (workers - 1) / workers)
    start_gather = TorchWorkers.start_gather

    def gathered(self, name, rows, *args):
        note("all-gather", rows, workers - 1)
        return start_gather(self, name, rows, *args)

    TorchWorkers.start_gather = gathered
    return sent


def _most_alive(profiled: Any) -> int:
    """Return the peak of the bytes of all live tensors."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiled.export_chrome_trace(path)
        with open(path, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    return max(
        event["args"]["Total Allocated"]
        for event in events
        if event.get("name") == "[memory]"
    )
