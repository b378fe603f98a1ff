"""Variables of optimizers of which each replica keeps a share of the elements.

Native tf.distribute has a component of such a variable on each device, as of any other.
Here they are of different values, and perhaps sizes: what a replica updates of a weight
by itself.
"""

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_strategy.backends.tensorflow.workers import TensorFlowWorkers
from keras_strategy.core.step_state import StepState
from keras_strategy.rules.sharding import DIVISION, Shares, shares_of_gradients

# Of a gradient, the replica's share of its sum.
_OWN_PART = "_ks_own_part"


def part_of(whole: Any, shares: Shares, replica: int) -> Any:
    """What a replica keeps of a tensor."""
    if isinstance(whole, tf.IndexedSlices):
        return _part_of_slices(whole, shares, replica)
    begin, end = shares.bounds[replica]
    flat = tf.reshape(whole, [-1])[begin:end]
    return tf.reshape(flat, shares.shape_of(replica))


def _part_of_slices(whole: Any, shares: Shares, replica: int) -> Any:
    """What a replica keeps of a gradient that has some rows, perhaps more than once.

    Keras's optimizers square each of them by itself, so they are not added up before.
    """
    if shares.shape_of(replica) == shares.shape:
        return whole
    begin, end = shares.bounds[replica]
    width = math.prod(shares.shape[1:])
    rows = tf.cast(whole.indices, tf.int64)[:, None]
    elements = tf.reshape(rows * width + tf.range(width, dtype=tf.int64), [-1])
    kept = (begin <= elements) & (elements < end)
    return tf.IndexedSlices(
        tf.boolean_mask(tf.reshape(whole.values, [-1]), kept),
        tf.boolean_mask(elements, kept) - begin,
        tf.constant([end - begin], tf.int64),
    )


def shares_to_add_up(
    step: StepState, gradients: Sequence[Any], workers: TensorFlowWorkers | None
) -> list[Shares] | None:
    """Of which elements of gradients each worker's one replica needs the sum.

    Args:
        step: What is true of the replica's step.
        gradients: The gradients.
        workers: The processes, or None for this one alone.

    Returns:
        None if the sums are to be whole on each replica.
    """
    optimizer = step.optimizer
    division = None if optimizer is None else vars(optimizer).get(DIVISION)
    # What one worker needs much more of than others would be sent to all as that much.
    if workers is None or division is None or not division.elementwise:
        return None
    # On GPUs it was not tried.
    if workers.on_accelerators or any(
        isinstance(gradient, tf.IndexedSlices)
        or not workers.along.may_add_up([gradient])
        for gradient in gradients
    ):
        return None
    return shares_of_gradients(optimizer, gradients, step.gradients_of)


def with_own_part(gradient: Any, part: Any, shares: Shares, replica: int) -> Any:
    """A gradient's sum of which only this replica's share is known.

    Args:
        gradient: The gradient.
        part: The share, of one dimension.
        shares: Which elements of it each replica keeps.
        replica: The replica's number.

    Returns:
        What `own_part_of` takes. For who reads it all the same it is no number.
    """
    whole = tf.fill(gradient.shape, tf.constant(math.nan, gradient.dtype))
    setattr(whole, _OWN_PART, tf.reshape(part, shares.shape_of(replica)))
    return whole


def own_part_of(gradient: Any, shares: Shares, replica: int) -> Any:
    """A replica's share of a gradient's sum, see `with_own_part`."""
    part = getattr(gradient, _OWN_PART, None)
    return part_of(gradient, shares, replica) if part is None else part


def with_part(whole: Any, part: Any, shares: Shares, replica: int) -> Any:
    """A tensor with what a replica has updated of it."""
    if part.shape == whole.shape:
        return part
    begin, end = shares.bounds[replica]
    flat = tf.reshape(whole, [-1])
    around = [flat[:begin], tf.reshape(part, [-1]), flat[end:]]
    return tf.reshape(tf.concat(around, 0), shares.shape)


def together(
    parts: Sequence[Sequence[Any]],
    shares: Sequence[Shares],
    workers: TensorFlowWorkers | None,
    name: str,
) -> list[Any]:
    """Whole tensors, of what the replicas keep of them.

    Args:
        parts: What each replica of this worker keeps of each tensor.
        shares: Of each tensor, which elements each replica keeps.
        workers: The processes that the replicas belong to, or None for this one alone.
        name: What it is for.
    """
    flat = [[tf.reshape(part, [-1]) for part in own] for own in parts]
    if workers is None:
        of_each = [list(of_one) for of_one in zip(*flat, strict=True)]
    else:
        of_each = _of_workers(flat, shares, workers, name)
    return [
        tf.reshape(tf.concat(of_one, 0), one.shape)
        for of_one, one in zip(of_each, shares, strict=True)
    ]


def _of_workers(
    flat: Sequence[Sequence[Any]],
    shares: Sequence[Shares],
    workers: TensorFlowWorkers,
    name: str,
) -> list[Any]:
    """What all replicas keep of each tensor; those of one dtype travel together."""
    of_each: list[Any] = [None] * len(shares)
    for dtype in dict.fromkeys(part.dtype for part in flat[0]):
        numbers = [i for i, part in enumerate(flat[0]) if part.dtype == dtype]
        own = tf.concat([own[i] for own in flat for i in numbers], 0)
        every, _ = workers.gather(name, own, 0)
        replicas = range(len(shares[0].bounds))
        sizes = [shares[i].size_of(replica) for replica in replicas for i in numbers]
        pieces = tf.split(every, sizes)
        for place, i in enumerate(numbers):
            of_each[i] = pieces[place :: len(numbers)]
    return of_each
