"""The functions of `fit`, `evaluate` and `predict` for a batch: a loop over `run`.

Merging the logs of a batch costs a collective. It is left out if no callback, on any
worker, reads them.
"""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import torch
from keras import tree

from keras_strategy.backends.torch.compilation import CompiledModel
from keras_strategy.core.step_state import RowRange
from keras_strategy.data.local_rows import LocalRows, local_bounds_fn
from keras_strategy.keras_patches.layers import all_layers, user_code
from keras_strategy.keras_patches.trainer import listens
from keras_strategy.training import train_step as rules
from keras_strategy.training.audit import RowAudit
from keras_strategy.training.callbacks import LogFreeCallback
from keras_strategy.training.train_step import count_array_rows
from keras_strategy.values import (
    PerReplica,
    is_numeric_array,
    map_leaves,
    select_replica,
)

_ATTRIBUTE = "_ks_batch_logs"


class BatchLogs:
    """The logs that a train or test function returns.

    Keras's loop passes them to the callbacks. It ends the epoch with the metrics'
    results if all logs are named after metrics.

    Attributes:
        are_read: True if a callback may read them.
        metric_names: The model's metrics; None until a batch was merged.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Assume that the logs are read."""
        self.are_read = True
        self.metric_names: set[str] | None = None

    def of_metrics(self, model: keras.Model) -> dict[str, Any]:
        """Return the logs of a step that returns only the model's metrics."""
        return model.get_metrics_result() if self.are_read else _UnreadLogs(model)

    def are_needed(self, logs: Any) -> bool:
        """Return True if the logs of the user's step must be merged."""
        return (
            self.are_read
            or not isinstance(logs, dict)
            or self.metric_names != set(logs)
        )

    @staticmethod
    def of(function: Any) -> "BatchLogs | None":
        """Return the logs of a train or test function of ours."""
        return getattr(function, _ATTRIBUTE, None)


class _UnreadLogs(dict):
    """A model's metrics, of which only the names are read, without a collective.

    Keras reads them at the end of an epoch, and then the metrics themselves.
    """

    def __init__(self, model: keras.Model):
        super().__init__()
        self._model = model

    def keys(self) -> Any:
        with keras.StatelessScope():
            return self._model.get_metrics_result().keys()


def may_read(callback: keras.callbacks.Callback, kind: str) -> bool:
    """Return True if a callback may read the logs of a "train" or "test" batch."""
    return not isinstance(callback, LogFreeCallback) and listens(callback, kind)


def detect_log_readers(strategy: Any, method: str, arguments: dict[str, Any]) -> None:
    """Add a callback that detects whether a loop's logs are read.

    The arguments of "fit" or "evaluate" are changed in place. The user's loop, or the
    creator of a `CallbackList`, may read the logs.
    """
    callbacks = arguments.get("callbacks")
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return  # that of `fit` has a detector already
    listed = list(keras.tree.flatten(callbacks or []))
    # Keras adds a progress bar, which reads them.
    is_shown = arguments.get("verbose", "auto") != 0
    arguments["callbacks"] = [*listed, _LogReaderDetector(strategy, listed, is_shown)]


class _LogReaderDetector(keras.callbacks.Callback):
    """Detects whether the logs of batches are read, when a loop begins."""

    def __init__(self, strategy: Any, callbacks: list[Any], is_shown: bool):
        super().__init__()
        self._strategy = strategy
        self._callbacks = callbacks
        self._is_shown = is_shown

    def on_train_begin(self, logs: Any = None) -> None:
        self._detect("train", "fit")

    def on_test_begin(self, logs: Any = None) -> None:
        self._detect("test", "evaluate")

    def _detect(self, kind: str, loop: str) -> None:
        batch_logs = BatchLogs.of(getattr(self.model, f"{kind}_function"))
        if batch_logs is None:
            return
        are_read = (
            getattr(type(self.model), loop) is not getattr(keras.Model, loop)
            or self._is_shown
            or any(may_read(callback, kind) for callback in self._callbacks)
        )
        cluster = self._strategy.extended.cluster
        if cluster is not None:
            operation = "whether the logs of batches are read"
            are_read = any(cluster.exchange(operation, are_read))
        batch_logs.are_read = are_read


def distributed_function(model: keras.Model, kind: str, strategy: Any) -> Callable:
    """Return the function that Keras's loop calls for a list of batches.

    The list has more than one with `steps_per_execution`, which Keras supports on torch
    since 3.16. `kind` is "train", "test" or "predict".
    """
    returns_metrics = rules.returns_only_metrics(model, kind)
    audit = RowAudit(model, user_code(model, kind), kind == "train", _warn_unless)
    weighted_step = rules.make_weighted_step(
        getattr(model, f"{kind}_step"),
        returns_metrics,
        lambda: all_layers(model),
        _check,
        audit,
        (lambda tensor: tensor.shape[0]) if kind == "predict" else None,
    )
    batch_logs = BatchLogs()
    compiled: Any = contextlib.nullcontext()
    if model.jit_compile and not model.run_eagerly:
        compiled = CompiledModel(model, strategy)

    arrays_to_tensors = strategy.extended.group.arrays_to_tensors

    def step(shard):
        data = arrays_to_tensors(shard.data) if shard.has_arrays else shard.data
        return weighted_step(data, shard.weight, shard.rows)

    def merge_logs(outputs, weights):
        with torch.no_grad():
            if returns_metrics:
                return batch_logs.of_metrics(model)
            if not batch_logs.are_needed(outputs):
                return select_replica(outputs, 0, len(weights))
            if batch_logs.metric_names is None:
                batch_logs.metric_names = set(model.get_metrics_result())
            return _mean_logs(outputs, strategy, weights)

    def run_batch(batch):
        local_batches = _split(batch, strategy)
        weights = [local.weight for local in local_batches]
        if kind == "train":
            outputs = strategy.run(step, args=(PerReplica(local_batches),))
            return merge_logs(outputs, weights)
        with torch.no_grad():
            if kind == "predict":
                _build(model, batch.batch if isinstance(batch, LocalRows) else batch)
            outputs = strategy.run(step, args=(PerReplica(local_batches),))
            if kind == "test":
                return merge_logs(outputs, weights)
        is_global = not (isinstance(batch, LocalRows) and batch.worker_rows)
        return _predictions(outputs, strategy, weights, is_global)

    def function(batches):
        with compiled:
            outputs = [run_batch(batch) for batch in batches]
        audit.active = False
        if kind == "predict" and len(outputs) > 1:
            return tree.map_structure(lambda *parts: torch.cat(parts), *outputs)
        return outputs[-1]

    setattr(function, _ATTRIBUTE, batch_logs)
    return function


def _build(model: keras.Model, batch: Any) -> None:
    """Build an untrained model, once for all replicas."""
    if all(layer.built for layer in all_layers(model)):
        return
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    model(
        tree.map_structure(
            lambda a: keras.KerasTensor(
                a.shape, keras.backend.standardize_dtype(a.dtype)
            ),
            x,
        )
    )


@dataclass(frozen=True)
class _LocalBatch:
    """The local batch of a replica; a leaf for Keras's trees.

    Attributes:
        data: The batch with the replica's rows of each array.
        weight: The row weight.
        rows: The range of the rows.
        has_arrays: True if some of the data are NumPy arrays.
    """

    data: Any
    weight: float
    rows: RowRange
    has_arrays: bool


def _split(batch: Any, strategy: Any) -> list[_LocalBatch]:
    """Split a global batch, or this worker's rows of it, over the local replicas.

    A replica without rows gets the first row and the weight 0, since some metrics do
    not accept a batch of 0 rows.
    """
    local = batch if isinstance(batch, LocalRows) else None
    batch = batch if local is None else local.batch
    arrays: list[Any] = []
    map_leaves(arrays.append, batch)
    rows = count_array_rows(arrays)
    if rows == 0:
        raise ValueError("A batch must have 1 row or more. Received a batch of 0 rows.")
    total = rows if local is None else local.global_rows
    bounds = local_bounds_fn(strategy)(total) if local is None else local.bounds
    first = 0 if local is None else bounds[0][0]

    def rows_of(array, begin, end):
        if array is None:
            return None
        # Slices of one tensor share autograd's version counter, so a replica's in-place
        # change would fail the others' backward pass. `data` has its own.
        data = array.data if isinstance(array, torch.Tensor) else array
        return data[begin:end] if end > begin else data[:1]

    has_arrays = any(map(is_numeric_array, arrays))
    return [
        _LocalBatch(
            map_leaves(
                lambda array, b=begin, e=end: rows_of(array, b - first, e - first),
                batch,
            ),
            (end - begin) / total,
            RowRange(min(begin, total - 1), max(end - begin, 1), total),
            has_arrays,
        )
        for begin, end in bounds
    ]


def _check(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _warn_unless(holds: Callable[[], Any], warn: Callable[[], None]) -> None:
    # The step afterwards draws the same random numbers.
    cuda = range(torch.cuda.device_count())
    with torch.random.fork_rng(cuda), torch.no_grad():
        if not holds():
            warn()


def _mean_logs(logs: Any, strategy: Any, weights: list[float]) -> Any:
    """Return the row-weighted means of what the replicas returned."""
    local = rules.average_logs(logs, weights)
    workers = strategy.extended.group.workers
    if workers is None:
        return local
    means = workers.sum_all("logs", tree.flatten(local))
    return tree.pack_sequence_as(local, means)


def metrics_of_workers(model: keras.Model, strategy: Any) -> dict[str, Any]:
    """Return `get_metrics_result` of all workers, in one collective."""
    group = strategy.extended.group
    sum_all = functools.partial(group.workers.sum_all, "logs")
    with torch.no_grad():
        return rules.merge_worker_metrics(model, group.part_of_this_worker, sum_all)


def _predictions(
    outputs: Any, strategy: Any, weights: list[float], is_global: bool
) -> Any:
    """Join the predictions of all workers' rows, or of this worker's."""
    group = strategy.extended.group

    def gather(value):
        if not isinstance(value, PerReplica):
            return value
        pairs = zip(value.values, weights, strict=True)
        values = [component for component, weight in pairs if weight > 0]
        # A worker without rows takes part in the gather, too.
        values = values or [value.values[0][:0]]
        if not is_global:
            device = group.torch_devices[0]
            return torch.cat([value.to(device) for value in values])
        return group.gather(values, axis=0)

    return tree.map_structure(gather, outputs)
