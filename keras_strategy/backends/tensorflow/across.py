"""Collectives of sparse and ragged values."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_strategy.backends.tensorflow.workers import TensorFlowWorkers, Verify
from keras_strategy.core.workers import WorkerCollectives


def sum_over_workers(
    workers: TensorFlowWorkers,
    name: str,
    values: Sequence[Any],
    verify: Verify = Verify.BEFORE,
) -> list[Any]:
    """Return the sums over the workers of tensors and `tf.IndexedSlices`."""
    results = list(values)
    dense = [i for i, x in enumerate(values) if not isinstance(x, tf.IndexedSlices)]
    tensors = [tf.convert_to_tensor(values[i]) for i in dense]
    sums = workers.sum_all(name, tensors, verify)
    for index, total in zip(dense, sums, strict=True):
        results[index] = total
    for index, value in enumerate(values):
        if isinstance(value, tf.IndexedSlices):
            results[index] = tf.IndexedSlices(
                workers.gather(name, value.values, 0)[0],
                workers.gather(name, value.indices, 0)[0],
                value.dense_shape,
            )
    return results


def gather_over_workers(workers: WorkerCollectives, name: str, value: Any, axis: int = 0) -> Any:
    """Concatenate the workers' values in rank order.

    Along axis 0, the value may also be ragged or sparse.
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
    first_row = tf.reduce_sum(shapes[: workers.rank, 0])
    rows, columns = value.indices[:, :1], value.indices[:, 1:]
    indices = tf.concat([rows + first_row, columns], 1)
    shape = tf.concat([[tf.reduce_sum(shapes[:, 0])], value.dense_shape[1:]], 0)
    return tf.SparseTensor(
        workers.gather(name, indices, 0)[0],
        workers.gather(name, value.values, 0)[0],
        shape,
    )
