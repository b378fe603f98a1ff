"""The rows of a distributed dataset that the replicas of a run are given."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from keras import tree

from keras_strategy.core.row_range import BatchRows, RowRange, ranges
from keras_strategy.core.step_state import StepState
from keras_strategy.hooks.draws_of_layers import of_layers, rehearse_layer
from keras_strategy.rules.batches import batch_of, carries_rows, traced_step_of
from keras_strategy.rules.draws import KnownDraws
from keras_strategy.values.distributed import PerReplica


def marks(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Which arguments are rows of a batch: a tf.function forgets what they carry.

    Args:
        leaves: The arguments.
    """
    batch, places = batch_of(leaves, {}), []
    if batch is not None:
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, PerReplica) and leaf.batch is batch:
                places.append(place)
    return tuple(places)


def mark(args: tuple, kwargs: dict, places: tuple[int, ...]) -> None:
    """Has arguments carry again what `marks` found.

    How many rows there are the tensors tell, since a program is for any number.
    """
    if places:
        leaves, batch = tree.flatten((args, kwargs)), BatchRows()
        for place in places:
            leaves[place].batch = batch


def steps_of_rows(
    fn: Callable[..., Any], args: tuple, kwargs: dict, replicas: int, of_workers: bool
) -> list[StepState] | None:
    """What is true of the replicas, if they are given rows of a batch.

    Args:
        fn: The function that they call.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        replicas: The number of replicas on this worker.
        of_workers: Whether there are other workers.
    """
    batch = batch_of(args, kwargs)
    if batch is None:
        return None
    if not of_workers:
        values = filter(carries_rows, tree.flatten((args, kwargs)))
        rows = [_ranges(x) for x in values if x.values[0].shape.rank != 0][:1]
        rows = rows[0] if rows else None
    elif batch.counts is None:
        rows = None
    else:
        rows = ranges(batch.counts)[batch.first : batch.first + replicas]
    if rows is None:
        return None
    if not tf.inside_function():
        return [
            StepState(rows=own, draws=of_layers, rehearse=rehearse_layer)
            for own in rows
        ]
    draws = KnownDraws()
    return [
        traced_step_of(fn, (args, kwargs), own, index, draws)
        for index, own in enumerate(rows)
    ]


def rows_of_tensor(value: Any) -> Any:
    """The rows of a tensor, dense, ragged or sparse, as a scalar tensor."""
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


def _ranges(value: PerReplica) -> list[RowRange]:
    """The rows of the local replicas, which are all."""
    # Numbers where a trace knows them, as it knows the shapes of what is drawn.
    counts: list[Any] = [
        rows_of_tensor(part) if part.shape[0] is None else part.shape[0]
        for part in value.values
    ]
    total = sum(counts)
    return [
        RowRange(sum(counts[:replica]), count, total)
        for replica, count in enumerate(counts)
    ]
