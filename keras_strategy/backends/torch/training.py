"""Whether anybody reads the logs of the batches, which costs a collective each.

fit, evaluate and predict on torch: a loop over `strategy.run`.
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
from keras_strategy.keras_patches.layers import all_layers, to_try
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
    """What becomes of the logs that a train or test function returns.

    Keras's loop gives them to the callbacks, and ends the epoch with the metrics' own
    results where all logs are named after metrics.

    Attributes:
        are_read: Whether somebody may look at them.
        of_metrics: The names of the model's metrics; None until a batch was merged.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Somebody looks, as far as is known."""
        self.are_read = True
        self.of_metrics: set[str] | None = None

    def of_own_step(self, model: keras.Model) -> dict[str, Any]:
        """The logs of a step that returns the model's metrics and no more."""
        return model.get_metrics_result() if self.are_read else _Unread(model)

    def are_needed(self, logs: Any) -> bool:
        """Whether logs of a user's step must be those of all replicas.

        Args:
            logs: What the replicas returned.
        """
        return self.are_read or not isinstance(logs, dict) or self._differ(logs)

    def _differ(self, logs: dict) -> bool:
        return self.of_metrics != set(logs)

    @staticmethod
    def of(function: Any) -> "BatchLogs | None":
        """Those of a function that was given some with `give_to`."""
        return getattr(function, _ATTRIBUTE, None)

    def give_to(self, function: Any) -> None:
        """Lets others find them by the function."""
        setattr(function, _ATTRIBUTE, self)


class _Unread(dict):
    """A model's metrics, of which nobody asks for more than the names.

    Keras does at the end of an epoch, and then takes the metrics themselves.

    Args:
        model: The model.
    """

    def __init__(self, model: keras.Model):
        super().__init__()
        self._model = model

    def keys(self) -> Any:
        """The names, of which other workers need not be asked."""
        with keras.StatelessScope():
            return self._model.get_metrics_result().keys()


def may_read(callback: keras.callbacks.Callback, kind: str) -> bool:
    """Whether a callback may look at the logs of a batch.

    Args:
        callback: The callback.
        kind: "train" or "test".
    """
    return not isinstance(callback, LogFreeCallback) and listens(callback, kind)


def detect_log_readers(strategy: Any, method: str, arguments: dict[str, Any]) -> None:
    """Has Keras's loop find out, when it begins, whether its logs are read.

    Where nobody does, on any worker, they need not be brought together. A loop that is
    not Keras's may, and so may whoever made a `CallbackList`.

    Args:
        strategy: The strategy.
        method: "fit" or "evaluate".
        arguments: The method's arguments by name; changed in place.
    """
    callbacks = arguments.get("callbacks")
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return  # that of `fit` has a watch already
    listed = list(keras.tree.flatten(callbacks or []))
    # Keras adds a progress bar, which reads them.
    shown = arguments.get("verbose", "auto") != 0
    arguments["callbacks"] = [*listed, _ReaderWatch(strategy, listed, shown)]


class _ReaderWatch(keras.callbacks.Callback):
    """Notes who reads the logs of batches, when a loop begins.

    Args:
        strategy: The strategy.
        callbacks: The other callbacks.
        shown: Whether Keras shows the logs.
    """

    def __init__(self, strategy: Any, callbacks: list[Any], shown: bool):
        super().__init__()
        self._strategy = strategy
        self._callbacks = callbacks
        self._shown = shown

    def on_train_begin(self, logs: Any = None) -> None:
        """Asks for the logs of `fit`."""
        self._note("train", "fit")

    def on_test_begin(self, logs: Any = None) -> None:
        """Asks for the logs of `evaluate`."""
        self._note("test", "evaluate")

    def _note(self, kind: str, loop: str) -> None:
        batch_logs = BatchLogs.of(getattr(self.model, f"{kind}_function"))
        if batch_logs is None:
            return
        own_loop = getattr(type(self.model), loop) is not getattr(keras.Model, loop)
        read = (
            own_loop or self._shown or any(may_read(c, kind) for c in self._callbacks)
        )
        cluster = self._strategy.extended.cluster
        if cluster is not None:
            read = any(cluster.exchange("whether the logs of batches are read", read))
        batch_logs.are_read = read


def distributed_function(model: keras.Model, kind: str, strategy: Any) -> Callable:
    """The function that Keras's loop calls for a batch, or for several.

    Args:
        model: The model.
        kind: "train", "test" or "predict".
        strategy: The model's strategy, of several replicas.

    Returns:
        A function of a list of batches, as the one that Keras makes. There is more
        than one of them with `steps_per_execution`, which Keras has on torch from 3.16
        on.
    """
    own = rules.returns_only_metrics(model, kind)
    trials = RowAudit(model, to_try(model, kind), kind == "train", _warn_unless)
    weighted = rules.make_weighted_step(
        getattr(model, f"{kind}_step"),
        own,
        lambda: all_layers(model),
        _require,
        trials,
        (lambda tensor: tensor.shape[0]) if kind == "predict" else None,
    )
    batch_logs = BatchLogs()
    compiles = model.jit_compile and not model.run_eagerly
    compiled = CompiledModel(model, strategy) if compiles else contextlib.nullcontext()

    tensors_of = strategy.extended.group.arrays_to_tensors

    def step(shard):
        data = tensors_of(shard.data) if shard.has_arrays else shard.data
        return weighted(data, shard.weight, shard.rows)

    def logs_of(outputs, weights):
        with torch.no_grad():
            if own:
                return batch_logs.of_own_step(model)
            if not batch_logs.are_needed(outputs):
                return select_replica(outputs, 0, len(weights))
            if batch_logs.of_metrics is None:
                batch_logs.of_metrics = set(model.get_metrics_result())
            return _means(outputs, strategy, weights)

    def one_batch(batch):
        shards = _shards(batch, strategy)
        weights = [shard.weight for shard in shards]
        if kind == "train":
            outputs = strategy.run(step, args=(PerReplica(shards),))
            return logs_of(outputs, weights)
        with torch.no_grad():
            if kind == "predict":
                _build(model, batch.batch if isinstance(batch, LocalRows) else batch)
            outputs = strategy.run(step, args=(PerReplica(shards),))
            if kind == "test":
                return logs_of(outputs, weights)
        of_all = not (isinstance(batch, LocalRows) and batch.worker_rows)
        return _rows_in_order(outputs, strategy, weights, of_all)

    def function(batches):
        with compiled:
            outputs = [one_batch(batch) for batch in batches]
        trials.active = False
        if kind == "predict" and len(outputs) > 1:
            return tree.map_structure(lambda *parts: torch.cat(parts), *outputs)
        return outputs[-1]

    batch_logs.give_to(function)
    return function


def _build(model: keras.Model, batch: Any) -> None:
    """Builds a model that is used before it was trained, once for all replicas."""
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
class _Shard:
    """What a replica gets of a batch; to Keras's trees it is a leaf.

    Attributes:
        data: The batch with the replica's rows in the place of each array.
        weight: The replica's weight.
        rows: Which rows these are.
        has_arrays: Whether some of the data is in NumPy's arrays.
    """

    data: Any
    weight: float
    rows: RowRange
    has_arrays: bool


def _shards(batch: Any, strategy: Any) -> list[_Shard]:
    """Splits a global batch.

    Args:
        batch: The batch, or this worker's rows of it.
        strategy: The strategy.

    Returns:
        The rows of this worker's replicas. One without rows gets a stand-in, the first
        row, and the weight 0: some metrics cannot take a batch of 0 rows.
    """
    own = batch if isinstance(batch, LocalRows) else None
    batch = batch if own is None else own.batch
    arrays: list[Any] = []
    map_leaves(arrays.append, batch)
    rows = count_array_rows(arrays)
    if rows == 0:
        raise ValueError("A batch must have 1 row or more. Received a batch of 0 rows.")
    total = rows if own is None else own.global_rows
    bounds = local_bounds_fn(strategy)(total) if own is None else own.bounds
    first = 0 if own is None else bounds[0][0]

    def part(array, begin, end):
        if array is None:
            return None
        # Slices of one tensor share the counter by which autograd notices
        # in-place changes; the replicas' are none of each other's business.
        data = array.data if isinstance(array, torch.Tensor) else array
        return data[begin:end] if end > begin else data[:1]

    has_arrays = any(map(is_numeric_array, arrays))
    return [
        _Shard(
            map_leaves(
                lambda array, b=begin, e=end: part(array, b - first, e - first), batch
            ),
            (end - begin) / total,
            RowRange(min(begin, total - 1), max(end - begin, 1), total),
            has_arrays,
        )
        for begin, end in bounds
    ]


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _warn_unless(holds: Callable[[], Any], warn: Callable[[], None]) -> None:
    # What a trial draws is drawn again afterwards.
    cuda = range(torch.cuda.device_count())
    with torch.random.fork_rng(cuda), torch.no_grad():
        if not holds():
            warn()


def _means(logs: Any, strategy: Any, weights: list[float]) -> Any:
    """The means of what the replicas returned."""
    parts = rules.average_logs(logs, weights)
    workers = strategy.extended.group.workers
    if workers is None:
        return parts
    # What this worker adds to them travels at once.
    means = workers.sum_all("logs", tree.flatten(parts))
    return tree.pack_sequence_as(parts, means)


def metrics_of_workers(model: keras.Model, strategy: Any) -> dict[str, Any]:
    """What `get_metrics_result` gives, in one collective between the workers."""
    group = strategy.extended.group
    sum_all = functools.partial(group.workers.sum_all, "logs")
    with torch.no_grad():
        return rules.merge_worker_metrics(model, group.part_of_this_worker, sum_all)


def _rows_in_order(
    outputs: Any, strategy: Any, weights: list[float], of_all: bool
) -> Any:
    """What was predicted: of the rows of all workers, or of this one's own."""
    group = strategy.extended.group

    def gather(value):
        if not isinstance(value, PerReplica):
            return value
        pairs = zip(value.values, weights, strict=True)
        values = [component for component, weight in pairs if weight > 0]
        # A worker without rows still takes part.
        values = values or [value.values[0][:0]]
        if not of_all:
            device = group.torch_devices[0]
            return torch.cat([value.to(device) for value in values])
        return group.gather(values, axis=0)

    return tree.map_structure(gather, outputs)
