"""Sums of tensors that tell, while they travel, what they are.

So workers learn that they add up different things without a collective for it.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_strategy.backends.tensorflow import layouts
from keras_strategy.core.workers import (
    MOST_WORKERS,
    TAIL,
    digest_of_sum,
    kind_of,
    tail_of,
)
from keras_strategy.rules.sharding import Shares

_DIFFERENT = "keras_strategy: the workers add up different things:"


class SumsThatTell:
    """What the workers add up where they know the shapes.

    Args:
        rank: The number of this worker.
        size: The number of workers.
        host: The device of TensorFlow's that compares.
        launch: Starts a collective, of a kind, with a tensor.
    """

    def __init__(
        self, rank: int, size: int, host: str, launch: Callable[[str, Any], Any]
    ):
        self._rank, self._size, self._host, self._launch = rank, size, host, launch
        self._names: dict[str, tuple[str, list[Any]]] = {}

    def may_add_up(self, tensors: Sequence[Any]) -> bool:
        """Whether tensors of one dtype can tell what they are while they travel."""
        shapes_are_known = all(tensor.shape.is_fully_defined() for tensor in tensors)
        exact = tensors[0].dtype in layouts.EXACT and self._size <= MOST_WORKERS
        return shapes_are_known and exact

    def sums(self, name: str, tensors: Sequence[Any]) -> list[Any]:
        """The sums of the workers' tensors, which travel together.

        Args:
            name: What they are for.
            tensors: Tensors that `may_add_up`.
        """
        key, tail = self._tail(name, tensors)
        flat = tf.concat([*(tf.reshape(x, [-1]) for x in tensors), tail], 0)
        sizes = [tensor.shape.num_elements() for tensor in tensors]
        *pieces, told = tf.split(self._launch("reduce", flat), [*sizes, TAIL])
        with tf.control_dependencies(self._compared(key, tail, told)):
            return [
                tf.reshape(piece, tensor.shape)
                for piece, tensor in zip(pieces, tensors, strict=True)
            ]

    def shares(
        self, name: str, tensors: Sequence[Any], shares: Sequence[Shares]
    ) -> list[Any]:
        """This worker's shares of the sums of the workers' tensors.

        Each sends the others their shares, and adds up what it is sent: half of what
        a sum of the wholes sends. For CPUs TensorFlow has no reduce-scatter.

        Args:
            name: What they are for.
            tensors: Tensors that `may_add_up`.
            shares: Of each, which elements each worker needs.

        Returns:
            Of each sum the share, of one dimension.
        """
        key, tail = self._tail(name, tensors)
        flat = [tf.reshape(tensor, [-1]) for tensor in tensors]
        sizes = [sum(x.size_of(rank) for x in shares) for rank in range(self._size)]
        pieces = []
        for rank, size in enumerate(sizes):
            pairs = zip(flat, shares, strict=True)
            pieces += [tensor[slice(*one.bounds[rank])] for tensor, one in pairs]
            # What each of them is sent is of one size.
            pieces += [tf.zeros([max(sizes) - size], tail.dtype), tail]
        sent = tf.reshape(tf.concat(pieces, 0), [self._size, max(sizes) + TAIL])
        total = tf.reduce_sum(self._launch("exchange", sent), 0)
        own = [one.size_of(self._rank) for one in shares]
        room = max(sizes) - sizes[self._rank]
        *sums, _, told = tf.split(total, [*own, room, TAIL])
        with tf.control_dependencies(self._compared(key, tail, told)):
            return [tf.identity(share) for share in sums]

    def what_differs(self, message: str) -> tuple[str, list[Any]] | None:
        """Of an error, the name of what the workers added up, and this worker's."""
        found = re.search(rf"{_DIFFERENT} (\w+)", message)
        return None if found is None else self._names[found[1]]

    def _tail(self, name: str, tensors: Sequence[Any]) -> tuple[str, Any]:
        """What travels behind tensors, and what messages call it."""
        dtype, shapes = tensors[0].dtype, tuple(tuple(x.shape) for x in tensors)
        digest = digest_of_sum(kind_of(name), shapes, dtype.name)
        key, layout = digest.hex(), [list(shape) for shape in shapes]
        self._names[key] = name, [layout if len(layout) > 1 else layout[0], dtype.name]
        return key, tf.constant(tail_of(digest), dtype)

    def _compared(self, key: str, tail: Any, told: Any) -> list[Any]:
        """What fails where the workers add up different things."""
        with tf.device(self._host):
            same = tf.reduce_all(told == self._size * tail)
            check = tf.debugging.Assert(same, [f"{_DIFFERENT} {key}"])
        return [] if check is None else [check]
