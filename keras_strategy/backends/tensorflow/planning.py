"""Planning on TensorFlow: a graph that never runs, and sharded slots."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_strategy.backends.threads.planning import can_scatter, plan_slots
from keras_strategy.core.protocols import PlannedChoice, StepTrace
from keras_strategy.keras_patches.variables_optimizers import byte_count
from keras_strategy.training.sharding import is_elementwise


def without_memory(fn: Callable[[], Any]) -> Any:
    with tf.Graph().as_default():
        return fn()


def trace_step(
    forward: Callable[[Any], Iterator[Any]], weights: list[Any], _: Any
) -> StepTrace:
    loss = tf.nest.flatten(list(forward(weights))[-1])
    operations = set(loss[0].graph.get_operations())
    tf.gradients(loss, weights)
    added = set(loss[0].graph.get_operations()) - operations
    saved = {x.ref() for op in added for x in op.inputs if x.op in operations}
    tensors = [ref.deref() for ref in saved - {weight.ref() for weight in weights}]
    for tensor in tensors:
        if tensor.dtype == tf.variant or not tensor.shape.is_fully_defined():
            raise ValueError(f"The size of the tensor {tensor.name!r} is unknown.")
    return StepTrace(sum([x.shape.num_elements() * x.dtype.size for x in tensors]))


def predict(
    weights: Sequence[Any],
    slots: Sequence[Any],
    optimizer: Any,
    replicas: int,
    shard: str | None,
    trace: StepTrace | None,
) -> PlannedChoice:
    size = sum(map(byte_count, weights))
    local, is_sharded = plan_slots(slots, replicas, shard)
    # One collective has all gradients, and another one all new weights.
    scatters = is_elementwise(optimizer) and can_scatter(optimizer)
    passes = 2 if scatters or not is_sharded else 3
    return PlannedChoice(
        shard,
        size,
        size,
        local,
        collectives=(1 + is_sharded) * (replicas > 1),
        sent=round(passes * size * (replicas - 1) / replicas),
        note="The peak is unknown: TensorFlow allocates as its runtime decides.",
    )
