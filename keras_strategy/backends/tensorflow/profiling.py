"""Counts of collectives, bytes, traces and copies between devices.

TensorFlow has no such counters on CPUs, but the graphs that it executes contain all of
it. Each executed function counts as often as it runs, with the operations of its graph
and of the functions that it calls. A loop inside a graph counts as one iteration.
"""

import collections
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function.atomic_function import AtomicFunction
from tensorflow.python.framework import func_graph, op_callbacks

HOST = "CPU:0"
# Operations whose outputs have the shape of their operands.
_ELEMENTWISE = {"Identity", "Add", "AddV2", "Sub", "Mul", "Square", "RealDiv", "Cast"}


@dataclass
class GraphCounts:
    """Counts of one execution of a graph.

    Attributes:
        collectives: Sums over the devices, by the name of their operation.
        bytes: The bytes that one device contributes to them.
        transfers: Tensors that one device computes and another one reads.
        outputs: The devices of the graph's results.
    """

    collectives: collections.Counter[str] = field(default_factory=collections.Counter)
    bytes: int = 0
    transfers: int = 0
    outputs: list[str] = field(default_factory=list)


def count(train: Callable[[int], None], steps: int) -> tuple[int, int, int, int]:
    """Count what training does, see `Engine.count`.

    Each trace of a tf.function counts as a compilation, except for tf.data's own
    functions. Batches that tf.data copies to the devices do not count as transfers.
    """
    executed, traced = [], []
    with _record_executions(executed):
        # Recording replaces functions that a step may read, after which `run` traces
        # the step again.
        train(1)
        executed.clear()
        with _record_traces(traced):
            train(steps)
    return (
        sum(sum(counts.collectives.values()) for counts in executed),
        sum(counts.bytes for counts in executed),
        len(traced),
        sum(counts.transfers for counts in executed),
    )


@contextlib.contextmanager
def _record_executions(executed: list[GraphCounts]) -> Iterator[None]:
    """Context manager that records this thread's functions and eager operations."""
    call_flat: Any = AtomicFunction.call_flat
    cache: dict[Any, GraphCounts] = {}

    def record_call(self, *args):
        if tf.executing_eagerly():
            devices = [_short_name(arg.device) for arg in args]
            key = (self, *devices)
            if key not in cache:
                cache[key] = count_graph(self.graph, devices)
            executed.append(cache[key])
        return call_flat(self, *args)

    def record_op(op_type, inputs, attrs, outputs, op_name=None, graph=None):
        if graph is None and op_type == "AddN":
            # From `strategy.reduce`: a function's outputs are on the first device.
            executed.append(_count_sum(op_type, inputs, outputs, ["each", "several"]))

    op_callbacks.add_op_callback(record_op)
    try:
        with _replaced(AtomicFunction, "call_flat", record_call):
            yield
    finally:
        op_callbacks.remove_op_callback(record_op)


@contextlib.contextmanager
def _record_traces(traced: list[str]) -> Iterator[None]:
    original: Any = func_graph.func_graph_from_py_func

    def record_trace(name, *args, **kwargs):
        if not name.startswith("Dataset"):
            traced.append(name)
        return original(name, *args, **kwargs)

    with _replaced(func_graph, "func_graph_from_py_func", record_trace):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def count_graph(graph: Any, arguments: Sequence[str]) -> GraphCounts:
    """Count the operations of a graph.

    Args:
        graph: The graph of a concrete function.
        arguments: The devices of its arguments, such as "CPU:1".
    """
    result = GraphCounts()
    places = {
        tensor.name: device
        for tensor, device in zip(graph.inputs, arguments, strict=True)
    }
    transfers = set()
    for op in graph.get_operations():
        inputs = [places[tensor.name] for tensor in op.inputs]
        callee = _called_graph(graph, op)
        if callee is not None:
            counts = count_graph(callee, inputs)
            result.collectives += counts.collectives
            result.bytes += counts.bytes
            result.transfers += counts.transfers
            places |= zip([x.name for x in op.outputs], counts.outputs, strict=False)
            continue
        if op.type == "Placeholder":
            continue
        place = _place(op, inputs)
        places |= {tensor.name: place for tensor in op.outputs}
        transfers |= {
            (tensor.name, place)
            for tensor, source in zip(op.inputs, inputs, strict=True)
            if source != place and tensor.dtype not in (tf.resource, tf.variant)
        }
        if op.type == "AddN":
            total = _count_sum(op.type, op.inputs, op.outputs, inputs)
        elif op.type.startswith(("Collective", "Nccl")) and place == HOST:
            total = _count_sum(op.type, op.inputs, op.outputs, ["each", "several"])
        else:
            continue
        result.collectives += total.collectives
        result.bytes += total.bytes
    result.transfers += len(transfers)
    result.outputs = [places[tensor.name] for tensor in graph.outputs]
    return result


def _count_sum(
    kind: str, inputs: Sequence[Any], outputs: Sequence[Any], devices: Sequence[str]
) -> GraphCounts:
    if len(set(devices)) < 2:
        return GraphCounts()
    shape: Any = _static_shape([inputs[0], *outputs])
    size = math.prod(shape) * inputs[0].dtype.size
    return GraphCounts(collections.Counter([kind]), size)


def _static_shape(tensors: list[Any]) -> tf.TensorShape:
    """Return the first static shape among tensors and what is computed from them.

    TensorFlow does not infer the shapes of some gradients, such as a Dense kernel's if
    its inputs have rank 3. But the optimizer adds them to slots of known shape.
    """
    for tensor in tensors:
        if tensor.shape.is_fully_defined():
            return tensor.shape
        uses = [op for op in tensor.consumers() if op.type in _ELEMENTWISE]
        tensors.extend(op.outputs[0] for op in uses)  # the loop visits them later
    raise ValueError(f"The shapes of {tensors} are not known.")


def _called_graph(graph: Any, op: Any) -> Any:
    if op.type not in ("PartitionedCall", "StatefulPartitionedCall"):
        return None
    return graph._get_function(op.get_attr("f").name).graph


def _place(op: Any, inputs: Sequence[str]) -> str:
    """Return the device of an operation; the placer colocates it with its variables."""
    for tensor, device in zip(op.inputs, inputs, strict=True):
        if tensor.dtype == tf.resource:
            return device
    return _short_name(op.device)


def _short_name(device: str) -> str:
    return ":".join(device.split("/")[-1].split(":")[-2:]).upper() if device else HOST
