"""Memory of a model in each of several one-device processes, and what they send.

On torch the peak is what its profiler counts of live tensors, from before the model is
made, and collectives are counted at torch.distributed. TensorFlow does not count the
memory of CPUs: the peak is what the process had resident above what it had before the
strategy was made, and collectives are those of the step's graph.
"""

import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import keras_strategy as ks
from benchmarks.memory import ROWS, Traffic, build_model


def measure_worker(width: int, shard: str | None) -> tuple[list[int], Traffic]:
    """Train two steps of one batch, and return sizes and collectives.

    The sizes are the bytes of the parameters, of the optimizer's slots and of the peak.
    The collectives are those of the second step.
    """
    measure = {"torch": _measure_torch, "tensorflow": _measure_tensorflow}
    return measure[keras.backend.backend()](width, shard)


def _train(
    width: int, shard: str | None, counter: Callable[[], Traffic]
) -> tuple[list[int], Traffic]:
    strategy = ks.MultiWorkerMirroredStrategy(shard=shard)
    model = build_model(strategy, width)
    batch = np.zeros((ROWS, width), "float32")
    model.fit(batch, batch, batch_size=ROWS, verbose=0)
    sent = counter()
    model.fit(batch, batch, batch_size=ROWS, verbose=0)
    report = strategy.memory_report(model)
    return [report.parameters[0], report.slots[0]], dict(sent)


def _measure_torch(width: int, shard: str | None) -> tuple[list[int], Traffic]:
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    def waiting(function):
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            time.sleep(0.05)  # a loaded machine needs that long
            return result

        return call

    torch.set_num_threads(1)
    for name in ("all_reduce", "all_to_all_single"):
        # The profiler misses what gloo's threads free later.
        setattr(dist, name, waiting(getattr(dist, name)))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        sizes, sent = _train(width, shard, count_on_torch)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiled.export_chrome_trace(path)
        with open(path, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    memory = (e["args"] for e in events if e.get("name") == "[memory]")
    return [*sizes, max(each["Total Allocated"] for each in memory)], sent


def _measure_tensorflow(width: int, shard: str | None) -> tuple[list[int], Traffic]:
    import keras_strategy.backends.tensorflow.collectives  # noqa: F401 (takes memory, too)

    def resident(name: str) -> int:
        with open("/proc/self/status", encoding="utf-8") as file:
            found = re.search(rf"^{name}:\s*(\d+) kB$", file.read(), re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024

    before = resident("VmRSS")
    sent = count_on_tensorflow()
    sizes, _ = _train(width, shard, dict)
    return [*sizes, resident("VmHWM") - before], sent


def count_traffic(least: int = 1000) -> Traffic:
    """Count collectives of so many bytes, and what this worker sends, from now on.

    The counts grow on torch; on TensorFlow they are those of the graph traced last.
    """
    count = {"torch": count_on_torch, "tensorflow": count_on_tensorflow}
    return count[keras.backend.backend()](least)


def _add(sent: Traffic, kind: str, num_bytes: float) -> None:
    count, before = sent.get(kind, (0, 0.0))
    sent[kind] = count + 1, before + num_bytes


def count_on_torch(least: int = 1000) -> Traffic:
    import torch.distributed as dist

    from keras_strategy.backends.torch.collectives import TorchWorkers

    sent: Traffic = {}
    if not dist.is_initialized():
        return sent
    workers = dist.get_world_size()

    def note(kind: str, tensor: Any, times: float) -> None:
        if tensor.nbytes >= least:
            _add(sent, kind, times * tensor.nbytes)

    def counting(name: str, kind: str, times: float) -> None:
        original = getattr(dist, name)

        def counted(tensor, *args, **kwargs):
            note(kind, tensor, times)
            return original(tensor, *args, **kwargs)

        setattr(dist, name, counted)

    counting("all_reduce", "all-reduce", 2 * (workers - 1) / workers)
    counting("all_to_all_single", "all-to-all", (workers - 1) / workers)
    start_gather = TorchWorkers.start_gather

    def gathered(self, name, rows, *args):
        note("all-gather", rows, workers - 1)
        return start_gather(self, name, rows, *args)

    TorchWorkers.start_gather = gathered
    return sent


def count_on_tensorflow(least: int = 1000) -> Traffic:
    import tensorflow as tf

    from keras_strategy.backends.tensorflow.collectives import TensorFlowWorkers

    sent: Traffic = {}
    traced: list[Any] = [None]

    def note(kind: str, tensor: Any, times: float) -> None:
        size = (tensor.shape.num_elements() or 0) * tensor.dtype.size
        if tf.executing_eagerly() or size < least:
            return
        graph = tf.compat.v1.get_default_graph()
        if graph is not traced[0]:
            traced[0] = graph
            sent.clear()
        _add(sent, kind, times * size)

    def counting(name: str, kind: str, factor: int) -> None:
        original = getattr(tf.raw_ops, name)

        def counted(**kwargs):
            workers = kwargs["group_size"]
            note(kind, kwargs["input"], factor * (workers - 1) / workers)
            return original(**kwargs)

        setattr(tf.raw_ops, name, counted)

    counting("CollectiveReduceV2", "all-reduce", 2)
    counting("CollectiveAllToAllV2", "all-to-all", 1)
    gather = TensorFlowWorkers.gather

    def gathered(self, name, tensor, axis):
        note("all-gather", tensor, self.size - 1)
        return gather(self, name, tensor, axis)

    TensorFlowWorkers.gather = gathered
    return sent
