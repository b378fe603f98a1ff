"""fit, evaluate and predict on torch: a loop over `strategy.run`."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch
from keras import tree

from keras_strategy.backends.torch import components
from keras_strategy.backends.torch.batch_logs import BatchLogs
from keras_strategy.training.row_weights import split_rows
from keras_strategy.training.step import (
    chosen_logs,
    mean_logs,
    rows_of,
    weighted_step,
)
from keras_strategy.values import PerReplica, select_replica
from keras_strategy.variables import is_on_read


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
    written: set[int] = set()
    step = weighted_step(getattr(model, f"{kind}_step"), written)
    batch_logs = BatchLogs()

    def logs_of(outputs, weights):
        if not batch_logs.are_needed(outputs):
            return select_replica(outputs, 0)
        logs, batch_logs.of_metrics = _merged(
            model, outputs, strategy, weights, written
        )
        return logs

    def one_batch(batch):
        shards, weights = _shard(batch, strategy)
        if kind == "train":
            outputs = strategy.run(step, args=(shards, PerReplica(weights)))
            return logs_of(outputs, weights)
        with torch.no_grad():
            if kind == "predict":
                _build(model, batch)
            outputs = strategy.run(step, args=(shards, PerReplica(weights)))
            if kind == "test":
                return logs_of(outputs, weights)
        return _rows_in_order(outputs, strategy, weights)

    def function(batches):
        outputs = [one_batch(batch) for batch in batches]
        if kind == "predict" and len(outputs) > 1:
            return tree.map_structure(lambda *parts: torch.cat(parts), *outputs)
        return outputs[-1]

    batch_logs.give_to(function)
    return function


def _build(model: keras.Model, batch: Any) -> None:
    """Builds a model that is used before it was trained, once for all replicas."""
    if all(layer.built for layer in model._flatten_layers()):
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


def _shard(batch: Any, strategy: Any) -> tuple[Any, list[float]]:
    """Splits a global batch.

    Returns:
        The batch with a `PerReplica` of its rows in the place of each array, and the
        weights, of this worker's replicas. One without rows gets a stand-in, the first
        row, and the weight 0: some metrics cannot take a batch of 0 rows.
    """
    rows = rows_of(batch)
    if rows == 0:
        raise ValueError("A batch must have 1 row or more. Received a batch of 0 rows.")
    local = strategy.extended.local_replicas
    bounds = split_rows(rows, strategy.num_replicas_in_sync)[local.start : local.stop]

    def shard(array):
        if array is None:
            return None
        if isinstance(array, torch.Tensor):
            # Slices of one tensor share the counter by which autograd notices
            # in-place changes; the replicas' are none of each other's business.
            parts = [array.data[b:e] if e > b else array.data[:1] for b, e in bounds]
        else:
            parts = [array[b:e] if e > b else array[:1] for b, e in bounds]
        return PerReplica(parts)

    weights = [(end - begin) / rows for begin, end in bounds]
    return tree.map_structure(shard, batch), weights


def _merged(
    model: keras.Model,
    logs: Any,
    strategy: Any,
    weights: list[float],
    written: set[int],
) -> tuple[Any, set[str] | None]:
    """The logs of a step, and the names of the model's metrics.

    Returns:
        See `training.step.merge_logs`; no names where the logs are no dict.
    """
    with torch.no_grad():
        parts = mean_logs(logs, len(weights), weights)
        # What this worker adds to the means and metrics travels at once.
        means, metrics = sums_and_metrics(model, strategy, tree.flatten(parts))
    means = tree.pack_sequence_as(parts, means)
    if not isinstance(logs, dict):
        return means, None
    return chosen_logs(model, means, metrics, written), set(metrics)


def sums_and_metrics(
    model: keras.Model, strategy: Any, values: Sequence[torch.Tensor] = ()
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The sums of the workers' values, and the model's metrics.

    Args:
        model: The model.
        strategy: Its strategy.
        values: This worker's.

    Returns:
        The sums, and what `get_metrics_result` gives. One collective for all of it.
    """
    workers = strategy.extended.group.workers
    if workers is None:
        return list(values), model.get_metrics_result()
    layout = strategy.extended.group.layout
    with torch.no_grad():
        states = [
            variable
            for variable in model.metrics_variables
            if is_on_read(variable) and variable.aggregation != "none"
        ]
        mine = [
            components.find_or_make(variable, layout).part_of_this_worker(variable)
            for variable in states
        ]
        sums = workers.sum_all("logs", [*values, *mine])
        merged = list(zip(states, sums[len(values) :], strict=True))
        with keras.StatelessScope(state_mapping=merged):
            return sums[: len(values)], model.get_metrics_result()


def _rows_in_order(outputs: Any, strategy: Any, weights: list[float]) -> Any:
    def gather(value):
        if not isinstance(value, PerReplica):
            return value
        pairs = zip(value.values, weights, strict=True)
        values = [component for component, weight in pairs if weight > 0]
        # A worker without rows still takes part.
        values = values or [value.values[0][:0]]
        return strategy.extended.group.gather(values, axis=0)

    return tree.map_structure(gather, outputs)
