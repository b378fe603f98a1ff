"""fit, evaluate and predict: Keras's own loop over `strategy.run` of a step.

Keras's TensorFlow trainer asks a native strategy to distribute the data and to run
each step. `TrainingStrategy` stands in for that strategy: it leaves the data whole,
splits every global batch by rows inside the step's tf.function, runs the step with
the replicas' row weights, and merges what they return before Keras sees it.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from keras import tree

from keras_strategy.backends.tensorflow.across import gather_of_workers
from keras_strategy.backends.tensorflow.group import TensorFlowGroup
from keras_strategy.backends.tensorflow.refusals import FirstStep, require
from keras_strategy.backends.tensorflow.rows import rows_of_tensor
from keras_strategy.backends.tensorflow.workers import Compare
from keras_strategy.core.row_range import RowRange
from keras_strategy.hooks.layers import all_layers, to_try
from keras_strategy.input.own_rows import OwnRows
from keras_strategy.rules.row_trials import RowTrials
from keras_strategy.rules.row_weights import split_rows
from keras_strategy.rules.step import (
    mean_logs,
    metrics_of_workers,
    returns_metrics,
    rows_of,
    weighted_step,
)
from keras_strategy.values.distributed import DistributedValues, PerReplica

if TYPE_CHECKING:
    from keras_strategy.core.strategy import Strategy

# Programs do not keep the variables that they use.
_first_steps: weakref.WeakKeyDictionary[Any, list[FirstStep]] = (
    weakref.WeakKeyDictionary()
)


class TrainingStrategy:
    """What Keras's trainer takes for the native strategy of a model.

    Args:
        strategy: Our strategy, of several replicas.
        model: The model that trains.
    """

    def __init__(self, strategy: "Strategy", model: keras.Model):
        group = strategy.extended.group
        assert isinstance(group, TensorFlowGroup)
        self._group = group
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group.native, name)

    def experimental_distribute_dataset(self, dataset: Any) -> Any:
        return dataset

    def run(self, step: Callable[[Any], Any], args: tuple = ()) -> Any:
        """Runs a step of the model on a global batch.

        Args:
            step: `train_step`, `test_step`, or what predicts.
            args: The batch, alone in a tuple.

        Returns:
            The merged logs, or the predictions of all rows.
        """
        (data,) = args
        group = self._group
        shards, weights, rows_of_replicas = split_batch(data, group)
        model = self._model
        steps = {model.train_step: "train", model.test_step: "test"}
        kind = steps.get(step, "predict")
        own = returns_metrics(model, kind)
        rows = rows_of_tensor if kind == "predict" else None
        layers = functools.partial(all_layers, model)
        first = FirstStep(group.peers.beside_them)
        if not tf.executing_eagerly():
            _first_steps.setdefault(model, []).append(first)
        trials = RowTrials(
            model, to_try(model, kind), kind == "train", first.warn_unless
        )
        replica_step = weighted_step(step, own, layers, require, trials, rows)
        outputs = group.call(
            replica_step,
            (PerReplica(shards), PerReplica(weights), PerReplica(rows_of_replicas)),
            {},
        )
        first.end()
        if own:
            return metrics_of(model, group)
        if kind != "predict":
            return means_of(outputs, group, weights)

        def in_order(value):
            if not isinstance(value, DistributedValues):
                return value
            rows = join(value, weights)
            if group.workers is None or getattr(data, "counts", None) is not None:
                return rows  # each worker predicts for itself what it has read
            return gather_of_workers(group.workers, "the predictions", rows)

        return tree.map_structure(in_order, outputs)


def metrics_of(model: keras.Model, group: TensorFlowGroup) -> dict[str, Any]:
    """What `get_metrics_result` gives, of the metrics' states on all replicas."""
    if group.workers is None:
        return model.get_metrics_result()
    sum_all = functools.partial(group.workers.sum_all, "logs", compare=Compare.NEVER)
    return metrics_of_workers(model, group.part_of_this_worker, sum_all)


def means_of(logs: Any, group: TensorFlowGroup, weights: Sequence[Any]) -> Any:
    """The means of what the replicas returned.

    Args:
        logs: What the local replicas returned, joined.
        group: All replicas.
        weights: The row weights of the local replicas.
    """
    parts = mean_logs(logs, weights)
    if group.workers is None:
        return parts
    # What this worker adds to them travels at once.
    means = group.workers.sum_all("logs", tree.flatten(parts), Compare.NEVER)
    return tree.pack_sequence_as(parts, means)


def split_batch(
    data: Any, group: TensorFlowGroup
) -> tuple[list[Any], list[Any], list[RowRange | None]]:
    """Splits a global batch by rows.

    Args:
        data: A structure of tensors or arrays, None where something is absent, or of
            native distributed values, which are split already; or this worker's
            rows of one.
        group: The replicas.

    Returns:
        The local replicas' structures, each of one row or more, their weights (rows
        over the batch's rows), and which rows these are, None if that is not known.
    """
    replicas = group.topology.num_replicas
    local = group.topology.local_replicas
    own, here = None, 0
    if isinstance(data, OwnRows):
        own, data = data, data.batch
        here = own.bounds[0][0]
    leaves = [leaf for leaf in tree.flatten(data) if leaf is not None]
    if not leaves:
        raise ValueError("A batch must hold at least one array. Received none.")
    if isinstance(leaves[0], tf.distribute.DistributedValues):

        def component(replica):
            return tree.map_structure(
                lambda leaf: leaf if leaf is None else leaf.values[replica], data
            )

        own = range(len(group.devices))
        shards = [component(replica) for replica in own]
        counts = [rows_of_tensor(leaves[0].values[replica]) for replica in own]
        total = tf.add_n(counts)
        rows_of_replicas: list[RowRange | None] = [None] * len(counts)
        if group.workers is None:
            before = [tf.add_n(counts[:replica] or [0 * total]) for replica in own]
            rows_of_replicas = [
                RowRange(begin, count, total)
                for begin, count in zip(before, counts, strict=True)
            ]
        else:
            total = group.workers.sum("the rows of a batch", total)
    else:
        data = tree.map_structure(_as_tensor, data)
        rows_here = common_rows([_as_tensor(leaf) for leaf in leaves])
        if own is None:
            rows = rows_here
            every = split_rows(rows, replicas, tf.minimum)
            bounds = [every[replica] for replica in local]
        else:
            rows, bounds = own.total, own.bounds
        counts = [end - begin for begin, end in bounds]
        total = rows
        shards, rows_of_replicas = [], []
        for begin, end in bounds:
            # A replica without rows works on a stand-in, of weight 0: some of
            # TensorFlow's kernels abort the process when there is no row at all.
            first = tf.maximum(tf.minimum(begin, here + rows_here - 1), 0)
            last = tf.maximum(end, first + 1)
            take = functools.partial(slice_rows, bounds=(first - here, last - here))
            number = tf.minimum(first, rows - 1)
            rows_of_replicas.append(RowRange(number, last - first, rows))
            shards.append(tree.map_structure(take, data))
        known = _as_tensor(leaves[0]).shape[0] if own is None else None
        if known is not None:  # what TensorFlow computes of them it would not know
            rows_of_replicas = [
                RowRange(min(begin, known - 1), max(end - begin, 1), known)
                for begin, end in split_rows(known, replicas)[local.start : local.stop]
            ]
    total = tf.cast(total, "float32")
    weights = [tf.cast(count, "float32") / total for count in counts]
    return shards, weights, rows_of_replicas


def common_rows(leaves: Sequence[Any]) -> Any:
    """The rows of a batch, as a tensor; arrays that differ in rows are refused."""
    if all(leaf.shape.rank and leaf.shape[0] is not None for leaf in leaves):
        rows_of(leaves)
        return rows_of_tensor(leaves[0])
    rows, *others = [rows_of_tensor(leaf) for leaf in leaves]
    message = "The arrays of a batch must have the same number of rows."
    checks = [tf.debugging.assert_equal(rows, other, message) for other in others]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(rows)  # nothing is computed from the batch before


def _as_tensor(value: Any) -> Any:
    if value is None or tf.is_tensor(value):
        return value
    return tf.convert_to_tensor(value)


def slice_rows(value: Any, bounds: tuple[Any, Any]) -> Any:
    """Some rows of a tensor, dense, ragged or sparse.

    Args:
        value: The tensor, or None.
        bounds: Where the rows begin and end; they may be tensors.
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


def join(value: DistributedValues, weights: Sequence[Any]) -> Any:
    """The predictions of this worker's rows, in order.

    Args:
        value: What the replicas returned.
        weights: Their weights; a replica of weight 0 predicted a stand-in.

    Returns:
        One tensor.
    """
    parts = value.values
    real = [
        slice_rows(part, (0, tf.where(weight > 0, rows_of_tensor(part), 0)))
        for part, weight in zip(parts, weights, strict=True)
    ]
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, real)
    return tf.concat(real, 0)
