"""Row ranges: the rows of a distributed dataset's batch that each replica gets."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from keras import tree

from keras_strategy.core.step_state import BatchRows, RowRange, StepState, row_ranges
from keras_strategy.keras_patches.random import dry_run_layer, layer_draws
from keras_strategy.training.random import BatchDimCache
from keras_strategy.training.train_step import (
    count_rows,
    find_batch_rows,
    has_batch_rows,
    traced_run_state,
)
from keras_strategy.values import PerReplica


def batch_argument_indices(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Return the indices of arguments that are rows of a batch.

    A tf.function drops the `batch` attribute of its arguments.
    """
    batch = find_batch_rows(leaves, {})
    indices = []  # in a loop: a generator costs a call per item in each step
    if batch is not None:
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, PerReplica) and leaf.batch is batch:
                indices.append(index)
    return tuple(indices)


def restore_batch(args: tuple, kwargs: dict, indices: tuple[int, ...]) -> None:
    """Set the `batch` attribute of arguments in a trace.

    The row counts come from the tensors, because a program serves any number of rows.
    """
    if indices:
        leaves, batch = tree.flatten((args, kwargs)), BatchRows()
        for index in indices:
            leaves[index].batch = batch


def step_states(
    fn: Callable[..., Any], args: tuple, kwargs: dict, replicas: int, has_workers: bool
) -> list[StepState] | None:
    """Return the local replicas' step states if the arguments are rows of a batch."""
    batch = find_batch_rows(args, kwargs)
    if batch is None:
        return None
    if not has_workers:
        values = filter(has_batch_rows, tree.flatten((args, kwargs)))
        rows = [_row_ranges(x) for x in values if x.values[0].shape.rank != 0][:1]
        rows = rows[0] if rows else None
    elif batch.counts is None:
        rows = None
    else:
        rows = row_ranges(batch.counts)[batch.first : batch.first + replicas]
    if rows is None:
        return None
    if not tf.inside_function():
        return [
            StepState(rows=row_range, draws=layer_draws, dry_run=dry_run_layer)
            for row_range in rows
        ]
    draws = BatchDimCache()
    return [
        traced_run_state(fn, (args, kwargs), row_range, index, draws)
        for index, row_range in enumerate(rows)
    ]


def rows_of_tensor(value: Any) -> Any:
    """Return the row count of a dense, ragged or sparse tensor as a scalar tensor."""
    if isinstance(value, tf.RaggedTensor):
        return tf.cast(value.nrows(), tf.int32)
    if isinstance(value, tf.SparseTensor):
        return tf.cast(value.dense_shape[0], tf.int32)
    if value.shape.rank == 0:
        raise ValueError(
            "A batch must be made of arrays whose first dimension is its rows. "
            "Received a scalar."
        )
    return tf.shape(value)[0]


def common_rows(leaves: Sequence[Any]) -> Any:
    """Return the rows of a batch as a tensor, after a check that all arrays agree."""
    if all(leaf.shape.rank and leaf.shape[0] is not None for leaf in leaves):
        count_rows(leaves)
        return rows_of_tensor(leaves[0])
    rows, *others = [rows_of_tensor(leaf) for leaf in leaves]
    message = "The arrays of a batch must have the same number of rows."
    checks = [tf.debugging.assert_equal(rows, other, message) for other in others]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(rows)  # nothing is computed from the batch before


def as_tensor(value: Any) -> Any:
    """Convert to a tensor, except None and sparse or ragged tensors."""
    if value is None or tf.is_tensor(value):
        return value
    return tf.convert_to_tensor(value)


def slice_rows(value: Any, bounds: tuple[Any, Any]) -> Any:
    """Return rows of a dense, ragged or sparse tensor; None for None.

    The bounds may be tensors.
    """
    begin, end = bounds
    if value is None:
        return None
    if not isinstance(value, tf.SparseTensor):
        return value[begin:end]
    shape = value.dense_shape
    begin, rows = tf.cast(begin, shape.dtype), tf.cast(end - begin, shape.dtype)
    start = tf.concat([[begin], tf.zeros_like(shape[1:])], 0)
    part = tf.sparse.slice(value, start, tf.concat([[rows], shape[1:]], 0))
    part.set_shape([None, *value.shape[1:]])
    return part


def _row_ranges(value: PerReplica) -> list[RowRange]:
    # Use numbers where a trace knows them, as it knows the shapes of what is drawn.
    counts: list[Any] = [
        rows_of_tensor(part) if part.shape[0] is None else part.shape[0]
        for part in value.values
    ]
    total = sum(counts)
    return [
        RowRange(sum(counts[:replica]), count, total)
        for replica, count in enumerate(counts)
    ]
