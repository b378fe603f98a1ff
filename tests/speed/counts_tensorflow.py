"""Counts of collectives, bytes, traces and copies on TensorFlow, in its graphs.

TensorFlow has no counters of collectives and copies on CPUs, but the graphs that it
executes contain all of it. Each executed function counts as often as it runs, with the
operations of its graph and of the functions that it calls. A loop inside a graph counts
as one iteration.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function.atomic_function import AtomicFunction
from tensorflow.python.framework import func_graph, op_callbacks

_HOST = "CPU:0"
_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
# Operations whose outputs have the shape of their operands.
_ELEMENTWISE = {"Identity", "Add", "AddV2", "Sub", "Mul", "Square", "RealDiv", "Cast"}


@dataclass
class _GraphCounts:
    collectives: int = 0  # sums over the devices
    bytes: int = 0  # what one device contributes to them
    transfers: int = 0  # tensors that one device computes and another one reads
    outputs: list[str] = field(default_factory=list)  # devices of the results

    def add_sum(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self.collectives += 1
        shape: Any = _static_shape([inputs[0], *outputs])
        self.bytes += math.prod(shape) * inputs[0].dtype.size


def count(train: Callable[[int], None], steps: int) -> tuple[int, int, int, int]:
    """Count what training does, see `tests.speed.counts.count_operations`."""
    # Each trace of a tf.function counts as a compilation, except for tf.data's own
    # functions. Batches that tf.data copies to the devices do not count as transfers.
    executed: list[_GraphCounts] = []
    traced: list[str] = []
    cache: dict[Any, _GraphCounts] = {}
    call_flat: Any = AtomicFunction.call_flat
    trace: Any = func_graph.func_graph_from_py_func

    def record_call(self, *args):
        if tf.executing_eagerly():
            devices = [_short_name(arg.device) for arg in args]
            key = (self, *devices)
            if key not in cache:
                cache[key] = _count_graph(self.graph, devices)
            executed.append(cache[key])
        return call_flat(self, *args)

    def record_op(op_type, inputs, attrs, outputs, op_name=None, graph=None):
        if graph is None and op_type == "AddN":
            # From `strategy.reduce`: a function's outputs are on the first device.
            counts = _GraphCounts()
            counts.add_sum(inputs, outputs)
            executed.append(counts)

    def record_trace(name, *args, **kwargs):
        if not name.startswith("Dataset"):
            traced.append(name)
        return trace(name, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        op_callbacks.add_op_callback(record_op)
        stack.callback(op_callbacks.remove_op_callback, record_op)
        stack.enter_context(mock.patch.object(AtomicFunction, "call_flat", record_call))
        # Recording replaces functions that a step may read, after which `run` traces
        # the step again.
        train(1)
        executed.clear()
        name = "func_graph_from_py_func"
        stack.enter_context(mock.patch.object(func_graph, name, record_trace))
        train(steps)
    return (
        sum(counts.collectives for counts in executed),
        sum(counts.bytes for counts in executed),
        len(traced),
        sum(counts.transfers for counts in executed),
    )


def _count_graph(graph: Any, arguments: Sequence[str]) -> _GraphCounts:
    """Count the operations of a graph whose arguments are on certain devices."""
    result = _GraphCounts()
    places = {
        tensor.name: device
        for tensor, device in zip(graph.inputs, arguments, strict=True)
    }
    transfers = set()
    for op in graph.get_operations():
        inputs = [places[tensor.name] for tensor in op.inputs]
        if op.type in _CALLS:
            callee = graph._get_function(op.get_attr("f").name).graph
            counts = _count_graph(callee, inputs)
            result.collectives += counts.collectives
            result.bytes += counts.bytes
            result.transfers += counts.transfers
            places |= zip([x.name for x in op.outputs], counts.outputs, strict=False)
            continue
        if op.type == "Placeholder":
            continue
        sources = list(zip(op.inputs, inputs, strict=True))
        # The placer colocates an operation with its variables.
        variables = [device for x, device in sources if x.dtype == tf.resource]
        place = variables[0] if variables else _short_name(op.device)
        places |= {tensor.name: place for tensor in op.outputs}
        transfers |= {
            (tensor.name, place)
            for tensor, source in sources
            if source != place and tensor.dtype not in (tf.resource, tf.variant)
        }
        is_collective = op.type.startswith(("Collective", "Nccl")) and place == _HOST
        # A function's outputs are on the first device.
        is_reduce = len(set(inputs)) > 1 or {x.op.type for x in op.inputs} <= _CALLS
        if is_collective or op.type == "AddN" and is_reduce:
            result.add_sum(op.inputs, op.outputs)
    result.transfers += len(transfers)
    result.outputs = [places[tensor.name] for tensor in graph.outputs]
    return result


def _static_shape(tensors: list[Any]) -> tf.TensorShape:
    """Return the first static shape among tensors and what is computed from them."""
    # TensorFlow does not infer the shapes of some gradients, such as a Dense kernel's
    # if its inputs have rank 3. But the optimizer adds them to slots of known shape.
    for tensor in tensors:
        if tensor.shape.is_fully_defined():
            return tensor.shape
        uses = [op for op in tensor.consumers() if op.type in _ELEMENTWISE]
        tensors.extend(op.outputs[0] for op in uses)  # the loop visits them later
    raise ValueError(f"The shapes of {tensors} are not known.")


def _short_name(device: str) -> str:
    """Return a device's name such as "CPU:1"."""
    return ":".join(device.split("/")[-1].split(":")[-2:]).upper() if device else _HOST
