"""Verified collectives: a checksum of name, shapes and dtype travels behind the values.

Workers that add up different things learn this without a collective of its own.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_strategy.backends.tensorflow import layouts
from keras_strategy.core.workers import (
    MAX_CHECKSUM_WORKERS,
    CHECKSUM_TAIL,
    call_checksum,
    operation_kind,
    checksum_tail,
)
from keras_strategy.rules.sharding import FlatShards

_SUMS_DIFFER = "keras_strategy: the workers add up different things:"


class VerifiedCollectives:
    """Sums of tensors of known shapes, verified by a checksum behind the values.

    Args:
        rank: This worker's rank.
        size: The number of workers.
        host: TensorFlow's name of the device that compares the checksums.
        launch: Launches a collective: `launch(kind, tensor)`.
    """

    def __init__(
        self, rank: int, size: int, host: str, launch: Callable[[str, Any], Any]
    ):
        self._rank, self._size, self._host, self._launch = rank, size, host, launch
        self._calls: dict[str, tuple[str, list[Any]]] = {}

    def can_verify(self, tensors: Sequence[Any]) -> bool:
        """Return True if tensors of one dtype can carry a checksum."""
        shapes_are_known = all(tensor.shape.is_fully_defined() for tensor in tensors)
        is_exact = tensors[0].dtype in layouts.EXACT_DTYPES
        return shapes_are_known and is_exact and self._size <= MAX_CHECKSUM_WORKERS

    def all_reduce(self, name: str, tensors: Sequence[Any]) -> list[Any]:
        """Return the sums over the workers of tensors that `can_verify` accepts."""
        key, checksum = self._checksum(name, tensors)
        flat = tf.concat([*(tf.reshape(x, [-1]) for x in tensors), checksum], 0)
        sizes = [tensor.shape.num_elements() for tensor in tensors]
        *sums, received = tf.split(self._launch("reduce", flat), [*sizes, CHECKSUM_TAIL])
        with tf.control_dependencies(self._verify(key, checksum, received)):
            return [
                tf.reshape(total, tensor.shape)
                for total, tensor in zip(sums, tensors, strict=True)
            ]

    def reduce_scatter(
        self, name: str, tensors: Sequence[Any], shares: Sequence[FlatShards]
    ) -> list[Any]:
        """Return this worker's flat shards of the sums of the workers' tensors.

        Each worker sends the others their shards and adds up what it receives, which
        is half of what an all-reduce sends. TensorFlow has no reduce-scatter for CPUs.

        Args:
            name: The name of the call.
            tensors: Tensors that `can_verify` accepts.
            shares: For each tensor, the elements that each worker needs.
        """
        key, checksum = self._checksum(name, tensors)
        flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
        sizes = [sum(x.size_of(rank) for x in shares) for rank in range(self._size)]
        chunks = []
        for rank, size in enumerate(sizes):
            pairs = zip(flat, shares, strict=True)
            chunks += [tensor[slice(*one.bounds[rank])] for tensor, one in pairs]
            # An all-to-all sends chunks of equal size.
            chunks += [tf.zeros([max(sizes) - size], checksum.dtype), checksum]
        sent = tf.reshape(tf.concat(chunks, 0), [self._size, max(sizes) + CHECKSUM_TAIL])
        total = tf.reduce_sum(self._launch("exchange", sent), 0)
        local_sizes = [one.size_of(self._rank) for one in shares]
        padding = max(sizes) - sizes[self._rank]
        *sums, _, received = tf.split(total, [*local_sizes, padding, CHECKSUM_TAIL])
        with tf.control_dependencies(self._verify(key, checksum, received)):
            return [tf.identity(shard) for shard in sums]

    def find_mismatch(self, message: str) -> tuple[str, list[Any]] | None:
        """Return the name and layout of this worker's call that an error refers to."""
        found = re.search(rf"{_SUMS_DIFFER} (\w+)", message)
        return None if found is None else self._calls[found[1]]

    def _checksum(self, name: str, tensors: Sequence[Any]) -> tuple[str, Any]:
        """Return the key of a call in error messages, and its checksum."""
        dtype, shapes = tensors[0].dtype, tuple(tuple(x.shape) for x in tensors)
        digest = call_checksum(operation_kind(name), shapes, dtype.name)
        key, layout = digest.hex(), [list(shape) for shape in shapes]
        self._calls[key] = name, [layout if len(layout) > 1 else layout[0], dtype.name]
        return key, tf.constant(checksum_tail(digest), dtype)

    def _verify(self, key: str, checksum: Any, received: Any) -> list[Any]:
        with tf.device(self._host):
            is_same = tf.reduce_all(received == self._size * checksum)
            check = tf.debugging.Assert(is_same, [f"{_SUMS_DIFFER} {key}"])
        return [] if check is None else [check]
