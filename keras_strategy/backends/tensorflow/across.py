"""The workers' values that are not plain tensors: sparse rows, ragged rows."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_strategy.backends.tensorflow.workers import Compare, TensorFlowWorkers
from keras_strategy.core.workers import Workers


def sum_of_workers(
    workers: TensorFlowWorkers,
    name: str,
    totals: Sequence[Any],
    compare: Compare = Compare.BEFORE,
) -> list[Any]:
    """The sums of the workers' values, dense ones in one piece.

    Args:
        workers: The workers.
        name: What the sums are for.
        totals: Tensors and `tf.IndexedSlices`.
        compare: When to make sure that dense ones have the same shapes and dtypes.

    Returns:
        A value for each, of the same kind.
    """
    results = list(totals)
    dense = [i for i, x in enumerate(totals) if not isinstance(x, tf.IndexedSlices)]
    tensors = [tf.convert_to_tensor(totals[i]) for i in dense]
    sums = workers.sum_all(name, tensors, compare)
    for index, total in zip(dense, sums, strict=True):
        results[index] = total
    for index, value in enumerate(totals):
        if isinstance(value, tf.IndexedSlices):
            results[index] = tf.IndexedSlices(
                workers.gather(name, value.values, 0)[0],
                workers.gather(name, value.indices, 0)[0],
                value.dense_shape,
            )
    return results


def gather_of_workers(workers: Workers, name: str, value: Any, axis: int = 0) -> Any:
    """The workers' values, joined in the order of their ranks.

    Args:
        workers: The workers.
        name: What it is for.
        value: A tensor; along axis 0 also a ragged or a sparse one.
        axis: Along which they are joined.
    """
    ragged: Any = tf.RaggedTensor  # TensorFlow's annotations lack its methods
    if isinstance(value, ragged):
        return ragged.from_nested_row_lengths(
            workers.gather(name, value.flat_values, 0)[0],
            [workers.gather(name, n, 0)[0] for n in value.nested_row_lengths()],
        )
    if not isinstance(value, tf.SparseTensor):
        return workers.gather(name, value, axis)[0]
    shapes, _ = workers.gather(name, value.dense_shape[tf.newaxis], 0)
    before = tf.reduce_sum(shapes[: workers.rank, 0])
    rows, columns = value.indices[:, :1], value.indices[:, 1:]
    indices = tf.concat([rows + before, columns], 1)
    shape = tf.concat([[tf.reduce_sum(shapes[:, 0])], value.dense_shape[1:]], 0)
    return tf.SparseTensor(
        workers.gather(name, indices, 0)[0],
        workers.gather(name, value.values, 0)[0],
        shape,
    )
