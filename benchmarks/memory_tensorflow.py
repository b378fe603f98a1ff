"""Memory of a model on TensorFlow, in each of several one-device processes.

See `benchmarks.memory`. TensorFlow does not count the memory of CPUs: the most at once
is what the process had resident above what it had before the strategy was made. What
is sent is read of the step's graph.
"""

import os
import re
from typing import Any

from benchmarks.memory import Found, trained


def of_worker(width: int, shard: str | None) -> Found:
    """Trains two steps of one batch, and tells of them.

    Args:
        width: Of the layers.
        shard: What is split.
    """
    import keras_strategy.backends.tensorflow.collectives  # noqa: F401 (takes memory, too)

    before = _resident("VmRSS")
    sent = count_what_is_sent()
    report, _ = trained(width, shard, dict)
    most = _resident("VmHWM") - before
    return Found(report.parameters[0], report.slots[0], most, sent)


def count_what_is_sent(least: int = 1000) -> dict[str, tuple[int, float]]:
    """Count the collectives of the graph that is traced last in the context.

    Args:
        least: The bytes of those that count.

    Returns:
        By kind how many, and the bytes that a ring sends.
    """
    import tensorflow as tf

    from keras_strategy.backends.tensorflow.collectives import TensorFlowWorkers

    sent: dict[str, tuple[int, float]] = {}
    traced: list[Any] = [None]

    def note(kind: str, tensor: Any, times: float) -> None:
        size = (tensor.shape.num_elements() or 0) * tensor.dtype.size
        if tf.executing_eagerly() or size < least:
            return
        graph = tf.compat.v1.get_default_graph()
        if graph is not traced[0]:
            traced[0] = graph
            sent.clear()
        count, before = sent.get(kind, (0, 0.0))
        sent[kind] = count + 1, before + times * size

    reduce, gather = tf.raw_ops.CollectiveReduceV2, TensorFlowWorkers.gather
    exchange = tf.raw_ops.CollectiveAllToAllV2

    def reduced(**kwargs):
        workers = kwargs["group_size"]
        note("all-reduce", kwargs["input"], 2 * (workers - 1) / workers)
        return reduce(**kwargs)

    def exchanged(**kwargs):
        workers = kwargs["group_size"]
        note("all-to-all", kwargs["input"], (workers - 1) / workers)
        return exchange(**kwargs)

    def gathered(self, name, tensor, axis):
        note("all-gather", tensor, self.size - 1)
        return gather(self, name, tensor, axis)

    tf.raw_ops.CollectiveReduceV2, TensorFlowWorkers.gather = reduced, gathered
    tf.raw_ops.CollectiveAllToAllV2 = exchanged
    return sent


def _resident(what: str) -> int:
    """Return a memory figure of this process in bytes, from the kernel."""
    with open(f"/proc/{os.getpid()}/status", encoding="utf-8") as file:
        found = re.search(rf"^{what}:\s*(\d+) kB$", file.read(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
