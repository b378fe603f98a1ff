"""What TensorFlow did: collectives, bytes, traces and copies between devices.

On CPUs TensorFlow has no counters. But it executes graphs, and they hold it all: each
executed function is counted as often as it runs, with the operations of its graph and
of those that it calls. Loops inside a graph count as one pass.
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
# What has the shape of its operands.
_ELEMENTWISE = {"Identity", "Add", "AddV2", "Sub", "Mul", "Square", "RealDiv", "Cast"}


@dataclass
class Graph:
    """What one execution of a graph does.

    Attributes:
        collectives: Sums over the devices, by the name of their operation.
        bytes: What one device gives to them.
        transfers: Tensors that one device computes and another one takes.
        outputs: The devices of the graph's results.
    """

    collectives: collections.Counter[str] = field(default_factory=collections.Counter)
    bytes: int = 0
    transfers: int = 0
    outputs: list[str] = field(default_factory=list)


def count(train: Callable[[int], None], steps: int) -> tuple[int, int, int, int]:
    """See `Engine.count`.

    A trace of a tf.function counts as a compilation, those of tf.data's own functions
    aside. The batches that tf.data brings to the devices are not among the transfers.
    """
    done, traced = [], []
    with _executed(done):
        # What notes them takes the place of functions that a step may read: then
        # `run` takes it for another one, and traces it again.
        train(1)
        done.clear()
        with _traced(traced):
            train(steps)
    return (
        sum(sum(graph.collectives.values()) for graph in done),
        sum(graph.bytes for graph in done),
        len(traced),
        sum(graph.transfers for graph in done),
    )


@contextlib.contextmanager
def _executed(done: list[Graph]) -> Iterator[None]:
    """Notes the functions and operations that this thread executes."""
    call_flat: Any = AtomicFunction.call_flat
    known: dict[Any, Graph] = {}

    def called(self, *args):
        if tf.executing_eagerly():
            devices = [_short(arg.device) for arg in args]
            key = (self, *devices)
            if key not in known:
                known[key] = of_graph(self.graph, devices)
            done.append(known[key])
        return call_flat(self, *args)

    def operation(op_type, inputs, attrs, outputs, op_name=None, graph=None):
        if graph is None and op_type == "AddN":
            # One of `strategy.reduce`: what a function returned is on the first device.
            done.append(_of_sum(op_type, inputs, outputs, ["each", "of several"]))

    op_callbacks.add_op_callback(operation)
    try:
        with _replaced(AtomicFunction, "call_flat", called):
            yield
    finally:
        op_callbacks.remove_op_callback(operation)


@contextlib.contextmanager
def _traced(traced: list[str]) -> Iterator[None]:
    """Notes the graphs that are made of Python functions."""
    original: Any = func_graph.func_graph_from_py_func

    def traced_as(name, *args, **kwargs):
        if not name.startswith("Dataset"):
            traced.append(name)
        return original(name, *args, **kwargs)

    with _replaced(func_graph, "func_graph_from_py_func", traced_as):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def of_graph(graph: Any, arguments: Sequence[str]) -> Graph:
    """Reads a graph.

    Args:
        graph: The graph of a concrete function.
        arguments: The devices of its arguments, such as "CPU:1".
    """
    result = Graph()
    places = {
        tensor.name: device
        for tensor, device in zip(graph.inputs, arguments, strict=True)
    }
    taken = set()
    for op in graph.get_operations():
        inputs = [places[tensor.name] for tensor in op.inputs]
        inner = _called(graph, op)
        if inner is not None:
            called = of_graph(inner, inputs)
            result.collectives += called.collectives
            result.bytes += called.bytes
            result.transfers += called.transfers
            places |= zip([x.name for x in op.outputs], called.outputs, strict=False)
            continue
        if op.type == "Placeholder":
            continue
        place = _place(op, inputs)
        places |= {tensor.name: place for tensor in op.outputs}
        taken |= {
            (tensor.name, place)
            for tensor, source in zip(op.inputs, inputs, strict=True)
            if source != place and tensor.dtype not in (tf.resource, tf.variant)
        }
        if op.type == "AddN":
            total = _of_sum(op.type, op.inputs, op.outputs, inputs)
        elif op.type.startswith(("Collective", "Nccl")) and place == HOST:
            total = _of_sum(op.type, op.inputs, op.outputs, ["each", "of several"])
        else:
            continue
        result.collectives += total.collectives
        result.bytes += total.bytes
    result.transfers += len(taken)
    result.outputs = [places[tensor.name] for tensor in graph.outputs]
    return result


def _of_sum(
    kind: str, inputs: Sequence[Any], outputs: Sequence[Any], devices: Sequence[str]
) -> Graph:
    if len(set(devices)) < 2:
        return Graph()
    shape: Any = _shape([inputs[0], *outputs])
    size = math.prod(shape) * inputs[0].dtype.size
    return Graph(collections.Counter([kind]), size)


def _shape(tensors: list[Any]) -> tf.TensorShape:
    """The first shape that is known, of these tensors or what is computed of them.

    TensorFlow does not know that of some gradients, such as a Dense kernel's where its
    inputs have rank 3. The optimizer adds them to a variable's slots, whose is known.
    """
    for tensor in tensors:
        if tensor.shape.is_fully_defined():
            return tensor.shape
        uses = [op for op in tensor.consumers() if op.type in _ELEMENTWISE]
        tensors.extend(op.outputs[0] for op in uses)  # which are looked at later
    raise ValueError(f"The shapes of {tensors} are not known.")


def _called(graph: Any, op: Any) -> Any:
    if op.type not in ("PartitionedCall", "StatefulPartitionedCall"):
        return None
    return graph._get_function(op.get_attr("f").name).graph


def _place(op: Any, inputs: Sequence[str]) -> str:
    """Where an operation is executed; the placer keeps it with its variables."""
    for tensor, device in zip(op.inputs, inputs, strict=True):
        if tensor.dtype == tf.resource:
            return device
    return _short(op.device)


def _short(device: str) -> str:
    return ":".join(device.split("/")[-1].split(":")[-2:]).upper() if device else HOST
