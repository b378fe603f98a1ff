"""fit, evaluate and predict: Keras's own loop over `strategy.run` of a step.

Keras's TensorFlow trainer calls a native strategy to distribute the data and to run
each step. `TrainingStrategy` stands in for that strategy. It leaves the data as it is,
splits every global batch by rows inside the step's tf.function, runs the step with
the replicas' row weights, and merges the outputs before Keras sees them.

On several workers, Keras's loop cannot take batches inside a tf.function: a worker
without further data would leave the others waiting there. So batches are taken in
Python, one for each call, after all workers have reported that they have one.
"""

import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from keras import tree

from keras_strategy.backends.tensorflow.collectives import Verify, gather_over_workers
from keras_strategy.backends.tensorflow.compile_cache import FirstStepCheck, require
from keras_strategy.backends.tensorflow.group import TensorFlowGroup
from keras_strategy.backends.tensorflow.row_ranges import (
    as_tensor,
    common_rows,
    rows_of_tensor,
    slice_rows,
)
from keras_strategy.core.step_state import RowRange
from keras_strategy.data.local_rows import LocalRows
from keras_strategy.keras_patches.layers import all_layers, seed_generators, user_code
from keras_strategy.training.audit import RowAudit
from keras_strategy.training.row_weights import split_rows
from keras_strategy.training.train_step import (
    average_logs,
    make_weighted_step,
    merge_worker_metrics,
    returns_only_metrics,
)
from keras_strategy.values import DistributedValues, PerReplica

if TYPE_CHECKING:
    from keras_strategy.core.protocols import Strategy


logger = logging.getLogger("keras_strategy")

# Programs do not keep the variables that they use alive.
_first_step_checks: weakref.WeakKeyDictionary[Any, list[FirstStepCheck]] = (
    weakref.WeakKeyDictionary()
)


class TrainingStrategy:
    """Stand-in for the native strategy of a model in Keras's trainer."""

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
        """Run a step on a global batch; return merged logs or all rows' predictions."""
        (data,) = args
        group = self._group
        shards, weights, row_ranges = split_batch(data, group)
        model = self._model
        kinds = {model.train_step: "train", model.test_step: "test"}
        kind = kinds.get(step, "predict")
        has_metrics = returns_only_metrics(model, kind)
        check = FirstStepCheck(group.state.call_outside)
        if not tf.executing_eagerly():
            _first_step_checks.setdefault(model, []).append(check)
        replica_step = make_weighted_step(
            step,
            has_metrics,
            functools.partial(all_layers, model),
            require,
            RowAudit(model, user_code(model, kind), kind == "train", check.warn_unless),
            rows_of_tensor if kind == "predict" else None,
        )
        outputs = group.call(
            replica_step,
            (PerReplica(shards), PerReplica(weights), PerReplica(row_ranges)),
            {},
        )
        check.end()
        if has_metrics:
            return metrics_result(model, group)
        if kind != "predict":
            return mean_outputs(outputs, group, weights)

        def merge_rows(value):
            if not isinstance(value, DistributedValues):
                return value
            rows = concat_predictions(value, weights)
            if group.workers is None or getattr(data, "worker_rows", None) is not None:
                return rows  # each worker predicts only what it has read
            return gather_over_workers(group.workers, "the predictions", rows)

        return tree.map_structure(merge_rows, outputs)


def metrics_result(model: keras.Model, group: TensorFlowGroup) -> dict[str, Any]:
    """Return `get_metrics_result`, from the metrics' states on all replicas."""
    if group.workers is None:
        return model.get_metrics_result()
    sum_all = functools.partial(group.workers.sum_all, "logs", verify=Verify.NEVER)
    return merge_worker_metrics(model, group.worker_contribution, sum_all)


def mean_outputs(outputs: Any, group: TensorFlowGroup, weights: Sequence[Any]) -> Any:
    """Return the means of the replicas' outputs by their row weights."""
    local = average_logs(outputs, weights)
    if group.workers is None:
        return local
    means = group.workers.sum_all("logs", tree.flatten(local), Verify.NEVER)
    return tree.pack_sequence_as(local, means)


def split_batch(
    data: Any, group: TensorFlowGroup
) -> tuple[list[Any], list[Any], list[RowRange | None]]:
    """Split a global batch by rows.

    Args:
        data: A structure of tensors or arrays, None where something is absent; or of
            native distributed values, which are split already; or an `LocalRows`.
        group: The replicas.

    Returns:
        The local replicas' batches, each of at least one row, their row weights, and
        their row ranges, None if they are unknown.
    """
    local_batch = data if isinstance(data, LocalRows) else None
    if local_batch is not None:
        data = local_batch.batch
    leaves = [leaf for leaf in tree.flatten(data) if leaf is not None]
    if not leaves:
        raise ValueError("A batch must hold at least one array. Received none.")
    if isinstance(leaves[0], tf.distribute.DistributedValues):
        return _unwrap_batch(data, leaves[0], group)
    data = tree.map_structure(as_tensor, data)
    leaves = [leaf for leaf in tree.flatten(data) if leaf is not None]
    local_rows = common_rows(leaves)
    if local_batch is None:
        first_row, total = 0, local_rows
        bounds = _local_bounds(group, total, tf.minimum)
    else:
        bounds, total = local_batch.bounds, local_batch.global_rows
        first_row = bounds[0][0]
    shards: list[Any] = []
    row_ranges: list[RowRange | None] = []
    for begin, end in bounds:
        # A replica without rows gets a stand-in row of weight 0: some of TensorFlow's
        # kernels abort the process on tensors without rows.
        begin = tf.maximum(tf.minimum(begin, first_row + local_rows - 1), 0)
        end = tf.maximum(end, begin + 1)
        rows = functools.partial(
            slice_rows, bounds=(begin - first_row, end - first_row)
        )
        row_ranges.append(RowRange(tf.minimum(begin, total - 1), end - begin, total))
        shards.append(tree.map_structure(rows, data))
    static_rows = leaves[0].shape[0] if local_batch is None else None
    if static_rows is not None:  # then use numbers instead of tensors
        row_ranges = [
            RowRange(min(begin, static_rows - 1), max(end - begin, 1), static_rows)
            for begin, end in _local_bounds(group, static_rows)
        ]
    return (
        shards,
        _row_weights([end - begin for begin, end in bounds], total),
        row_ranges,
    )


def _local_bounds(group: TensorFlowGroup, rows: Any, *minimum: Any) -> list[Any]:
    local = group.topology.local_replicas
    bounds = split_rows(rows, group.topology.num_replicas, *minimum)
    return bounds[local.start : local.stop]


def _unwrap_batch(
    data: Any, first_leaf: Any, group: TensorFlowGroup
) -> tuple[list[Any], list[Any], list[RowRange | None]]:
    """Split a batch of native distributed values, as `split_batch` does."""
    local = range(len(group.devices))
    shards = [
        tree.map_structure(
            lambda leaf, replica=replica: (
                leaf if leaf is None else leaf.values[replica]
            ),
            data,
        )
        for replica in local
    ]
    counts = [rows_of_tensor(first_leaf.values[replica]) for replica in local]
    total = tf.add_n(counts)
    if group.workers is not None:
        total = group.workers.sum("the rows of a batch", total)
        return shards, _row_weights(counts, total), [None] * len(counts)
    begins = [tf.add_n(counts[:replica] or [0 * total]) for replica in local]
    row_ranges: list[RowRange | None] = [
        RowRange(begin, count, total)
        for begin, count in zip(begins, counts, strict=True)
    ]
    return shards, _row_weights(counts, total), row_ranges


def _row_weights(counts: Sequence[Any], total: Any) -> list[Any]:
    total = tf.cast(total, "float32")
    return [tf.cast(count, "float32") / total for count in counts]


def concat_predictions(value: DistributedValues, weights: Sequence[Any]) -> Any:
    """Return this worker's predictions in row order, without stand-in rows."""
    parts = [
        slice_rows(part, (0, tf.where(weight > 0, rows_of_tensor(part), 0)))
        for part, weight in zip(value.values, weights, strict=True)
    ]
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, parts)
    return tf.concat(parts, 0)


_RANDOM_WARNING = (
    "The model '%s' draws random numbers, and its data has an unknown length. With "
    "such data, Keras's loop on TensorFlow draws once more at the end of each epoch; "
    "with several workers it does not. So later epochs draw different numbers than a "
    "single device. Pass `steps_per_epoch`, or a `tf.data.Dataset` of known length "
    "(`apply(tf.data.experimental.assert_cardinality(batches))`)."
)


class WorkerBatches:
    """Batches that all workers take together, as structures that a tf.function takes.

    Args:
        batches: `SynchronizedBatches` or `PerWorkerBatches`.
    """

    def __init__(self, batches: Iterable[Any]):
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return map(_as_traceable, iter(self._batches))


def _as_traceable(batch: Any) -> Any:
    return TensorLocalRows(**vars(batch)) if isinstance(batch, LocalRows) else batch


class TensorLocalRows(LocalRows):
    """A worker's rows of a batch, which a tf.function takes."""

    def __tf_flatten__(self) -> Any:
        numbers = tf.nest.map_structure(
            lambda number: tf.convert_to_tensor(number, tf.int32),
            (self.bounds, self.global_rows),
        )
        leaves = [leaf for leaf in tree.flatten(self.batch) if leaf is not None]
        # The row counts themselves would cause retracing.
        has_worker_rows = self.worker_rows is not None
        return (_BatchLayout(self.batch), has_worker_rows), (leaves, *numbers)

    @classmethod
    def __tf_unflatten__(cls, metadata: Any, components: Any) -> Any:
        (layout, has_worker_rows), (leaves, bounds, global_rows) = metadata, components
        batch, worker_rows = layout.with_leaves(leaves), () if has_worker_rows else None
        return cls(batch, bounds, global_rows, worker_rows=worker_rows)


class _BatchLayout:
    """The structure of a batch without the sizes of its arrays.

    TensorFlow retraces for a different layout. Its own search for a common type of two
    batches fails for objects with `__tf_flatten__`.
    """

    def __init__(self, batch: Any):
        self._is_present = tree.map_structure(lambda leaf: leaf is not None, batch)
        kinds = tree.map_structure(
            lambda leaf: (
                leaf is not None and (tf.as_dtype(leaf.dtype).name, len(leaf.shape))
            ),
            batch,
        )
        self._text = repr(kinds)

    def with_leaves(self, leaves: Iterable[Any]) -> Any:
        """Return a batch of this layout."""
        iterator = iter(leaves)
        return tree.map_structure(
            lambda is_present: next(iterator) if is_present else None, self._is_present
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BatchLayout) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)


class DatasetElements:
    """Elements of a `tf.data.Dataset` or local rows, with None for absent leaves.

    Lazy, because the start of an iteration may draw random numbers.
    """

    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        for batch in self._dataset:
            if isinstance(batch, LocalRows):
                # As Keras's own datasets do.
                yield replace(batch, batch=tree.lists_to_tuples(batch.batch))
                continue
            yield tree.map_structure(
                lambda leaf: (
                    None if isinstance(leaf, tf.experimental.Optional) else leaf
                ),
                batch,
            )


def sync_worker_steps(
    function: Callable[[Any], Any],
    group: TensorFlowGroup,
    model: keras.Model,
    kind: str,
) -> Callable[[Any], Any]:
    """Wrap the result of `make_train_function` or `make_test_function` for workers."""
    has_warned = False

    def run_steps(iterator):
        nonlocal has_warned
        outputs = None
        batches = iter(iterator)
        try:
            first = next(batches)
        except StopIteration:  # the end of the data is the end of the epoch
            if kind == "train" and not has_warned:
                has_warned = True
                _warn_of_random_numbers(model, group)
            raise
        others = itertools.islice(batches, model.steps_per_execution - 1)
        for batch in itertools.chain([first], others):
            with group.collective_scope("fit" if kind == "train" else "evaluate"):
                outputs = function(iter([batch]))
        return outputs

    return run_steps


def _warn_of_random_numbers(model: keras.Model, group: TensorFlowGroup) -> None:
    """Warn if Keras's compiled step draws before it finds the end of the data.

    Eager steps and steps of several batches take a batch first.
    """
    if model.run_eagerly or model.steps_per_execution > 1:
        return
    draws = seed_generators(all_layers(model))
    if draws and group.workers is not None and group.workers.cluster.is_chief:
        logger.warning(_RANDOM_WARNING, model.name)


def sync_worker_predictions(
    function: Callable[[Any], Any], group: TensorFlowGroup
) -> Callable[[Any], Any]:
    """Wrap the result of `make_predict_function` for workers."""

    def predict(batches):
        with group.collective_scope("predict"):
            return function(batches)

    return predict
