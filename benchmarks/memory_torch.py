"""What a model takes on torch, in each of several processes of one device.

See `benchmarks.memory`. The most that is alive is what torch's profiler counts of
tensors, from before the model is made; what is sent is counted at torch.distributed.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from typing import Any

from benchmarks.memory import LAYERS, ROWS

# What a ring sends of the bytes of a collective's largest tensor, by its name in torch.
_KINDS = {
    "all_reduce": ("all-reduce", 2.0),
    "all_gather_into_tensor": ("all-gather", 1.0),
    "all_to_all_single": ("all-to-all", 1.0),
}


def measured(width: int) -> Iterator[tuple]:
    """The rows of the table: N, what is split, and what a process found."""
    from keras_strategy.testing import WorkerRunner

    for workers in (1, 2, 4):
        for shard in (None, "optimizer") if workers > 1 else (None,):
            with WorkerRunner(workers, timeout_seconds=900) as runner:
                found = runner.run(of_worker, width, shard)
            yield workers, shard, max(found, key=lambda one: one["slots"])


def of_worker(width: int, shard: str | None) -> dict[str, Any]:
    """Trains two steps of one batch, and tells of the second.

    Args:
        width: Of the layers.
        shard: What is split.
    """
    import keras
    import numpy as np
    import torch
    from torch.profiler import ProfilerActivity, profile

    import keras_strategy as ks

    torch.set_num_threads(1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as of_all:
        strategy = ks.MultiWorkerMirroredStrategy(shard=shard)
        with strategy.scope():
            dense = [keras.layers.Dense(width, "tanh") for _ in range(LAYERS)]
            model = keras.Sequential([keras.Input((width,)), *dense])
            model.compile(keras.optimizers.Adam(), "mse")
        batch = np.zeros((ROWS, width), "float32")
        model.fit(batch, batch, batch_size=ROWS, verbose=0)
        sent = count_what_is_sent()
        model.fit(batch, batch, batch_size=ROWS, verbose=0)
    report = strategy.memory_report(model)
    return {
        "parameters": report.parameters[0],
        "slots": report.slots[0],
        "alive": _most_alive(of_all),
        "sent": sent,
    }


def count_what_is_sent(least: int = 1000) -> dict[str, tuple[int, float]]:
    """Counts from now on the collectives by kind, and the bytes that a ring sends.

    Args:
        least: The bytes of those that count.
    """
    import torch.distributed as dist

    sent: dict[str, tuple[int, float]] = {}
    if not dist.is_initialized():
        return sent
    share = (dist.get_world_size() - 1) / dist.get_world_size()

    def counting(name: str) -> None:
        original, (kind, factor) = getattr(dist, name), _KINDS[name]

        def counted(tensor, *args, **kwargs):
            size = tensor.numel() * tensor.element_size()
            if size >= least:
                count, before = sent.get(kind, (0, 0.0))
                sent[kind] = count + 1, before + factor * share * size
            return original(tensor, *args, **kwargs)

        setattr(dist, name, counted)

    for name in _KINDS:
        counting(name)
    return sent


def _most_alive(profiled: Any) -> int:
    """The most bytes of tensors that were alive at a time."""
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
