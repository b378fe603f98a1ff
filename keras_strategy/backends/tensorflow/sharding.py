"""Sharded variables and gradients: each replica stores or sums a part of the elements.

Native tf.distribute has a component of such a variable on each device, as of any other
variable. Here the components differ in value, and possibly in size.
"""

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_strategy.backends.tensorflow.collectives import TensorFlowWorkers
from keras_strategy.core.step_state import StepState
from keras_strategy.training.sharding import (
    OPTIMIZER_SHARDING,
    FlatShards,
    gradient_shards,
)

# The attribute of a gradient that holds the replica's shard of its sum.
_SHARD = "_ks_shard"


def local_shard(full: Any, shares: FlatShards, replica: int) -> Any:
    """Return a replica's shard of a tensor or of `tf.IndexedSlices`."""
    if isinstance(full, tf.IndexedSlices):
        return _shard_of_slices(full, shares, replica)
    begin, end = shares.bounds[replica]
    flat = tf.reshape(full, [-1])[begin:end]
    return tf.reshape(flat, shares.shape_of(replica))


def _shard_of_slices(slices: Any, shares: FlatShards, replica: int) -> Any:
    """Return a replica's elements of slices, in which a row may occur repeatedly.

    Repeated rows are not added up, because Keras's optimizers square each of them.
    """
    if shares.shape_of(replica) == shares.shape:
        return slices
    begin, end = shares.bounds[replica]
    width = math.prod(shares.shape[1:])
    rows = tf.cast(slices.indices, tf.int64)[:, None]
    elements = tf.reshape(rows * width + tf.range(width, dtype=tf.int64), [-1])
    is_local = (begin <= elements) & (elements < end)
    return tf.IndexedSlices(
        tf.boolean_mask(tf.reshape(slices.values, [-1]), is_local),
        tf.boolean_mask(elements, is_local) - begin,
        tf.constant([end - begin], tf.int64),
    )


def reduce_scatter_shares(
    step: StepState, gradients: Sequence[Any], workers: TensorFlowWorkers | None
) -> list[FlatShards] | None:
    """Return the elements of each gradient that each worker's one replica needs.

    Returns:
        None if gradients must be summed in full on each replica.
    """
    optimizer = step.optimizer
    optimizer_sharding = (
        None if optimizer is None else vars(optimizer).get(OPTIMIZER_SHARDING)
    )
    # An all-to-all sends chunks of equal size, so shards must be even.
    if (
        workers is None
        or optimizer_sharding is None
        or not optimizer_sharding.elementwise
    ):
        return None
    # Not measured on GPUs.
    if workers.uses_accelerators or any(
        isinstance(gradient, tf.IndexedSlices)
        or not workers.verified.can_verify([gradient])
        for gradient in gradients
    ):
        return None
    return gradient_shards(optimizer, gradients, step.reducing_gradients_of)


def attach_shard(gradient: Any, shard: Any, shares: FlatShards, replica: int) -> Any:
    """Return a gradient's sum of which only this replica's shard is known.

    Its elements are NaN, for code that reads it without `gradient_shard`.
    """
    total = tf.fill(gradient.shape, tf.constant(math.nan, gradient.dtype))
    setattr(total, _SHARD, tf.reshape(shard, shares.shape_of(replica)))
    return total


def gradient_shard(gradient: Any, shares: FlatShards, replica: int) -> Any:
    """Return a replica's shard of a gradient's sum, see `attach_shard`."""
    shard = getattr(gradient, _SHARD, None)
    return local_shard(gradient, shares, replica) if shard is None else shard


def replace_shard(full: Any, shard: Any, shares: FlatShards, replica: int) -> Any:
    """Return a tensor with a replica's shard replaced."""
    if shard.shape == full.shape:
        return shard
    begin, end = shares.bounds[replica]
    flat = tf.reshape(full, [-1])
    pieces = [flat[:begin], tf.reshape(shard, [-1]), flat[end:]]
    return tf.reshape(tf.concat(pieces, 0), shares.shape)


def gather_shards(
    shards: Sequence[Sequence[Any]],
    shares: Sequence[FlatShards],
    workers: TensorFlowWorkers | None,
    name: str,
) -> list[Any]:
    """Return full tensors.

    Args:
        shards: For each local replica, its shard of each tensor.
        shares: For each tensor, the elements that each replica has.
        workers: The workers, or None.
        name: The name of the call.
    """
    flat = [[tf.reshape(shard, [-1]) for shard in replica] for replica in shards]
    if workers is None:
        by_tensor = [list(pieces) for pieces in zip(*flat, strict=True)]
    else:
        by_tensor = _gather_over_workers(flat, shares, workers, name)
    return [
        tf.reshape(tf.concat(pieces, 0), one.shape)
        for pieces, one in zip(by_tensor, shares, strict=True)
    ]


def _gather_over_workers(
    flat: Sequence[Sequence[Any]],
    shares: Sequence[FlatShards],
    workers: TensorFlowWorkers,
    name: str,
) -> list[Any]:
    """Return all replicas' shards of each tensor, with one collective per dtype."""
    by_tensor: list[Any] = [None] * len(shares)
    for dtype in dict.fromkeys(shard.dtype for shard in flat[0]):
        indices = [i for i, shard in enumerate(flat[0]) if shard.dtype == dtype]
        local = tf.concat([replica[i] for replica in flat for i in indices], 0)
        gathered, _ = workers.gather(name, local, 0)
        replicas = range(len(shares[0].bounds))
        sizes = [shares[i].size_of(replica) for replica in replicas for i in indices]
        pieces = tf.split(gathered, sizes)
        for place, i in enumerate(indices):
            by_tensor[i] = pieces[place :: len(indices)]
    return by_tensor
