"""fit, evaluate and predict on torch: a loop over `strategy.run`."""

from collections.abc import Callable
from typing import Any

import keras
import torch
from keras import tree

from keras_strategy.training.row_weights import split_rows
from keras_strategy.training.step import merge_logs, rows_of, weighted_step
from keras_strategy.values import PerReplica


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

    def one_batch(batch):
        replicas = strategy.num_replicas_in_sync
        shards, weights = _shard(batch, replicas)
        if kind == "train":
            logs = strategy.run(step, args=(shards, PerReplica(weights)))
            return merge_logs(model, logs, replicas, weights, written)
        with torch.no_grad():
            if kind == "predict":
                _build(model, batch)
            outputs = strategy.run(step, args=(shards, PerReplica(weights)))
            if kind == "test":
                return merge_logs(model, outputs, replicas, weights, written)
        return _rows_in_order(outputs, strategy, weights)

    def function(batches):
        outputs = [one_batch(batch) for batch in batches]
        if kind == "predict" and len(outputs) > 1:
            return tree.map_structure(lambda *parts: torch.cat(parts), *outputs)
        return outputs[-1]

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


def _shard(batch: Any, replicas: int) -> tuple[Any, list[float]]:
    """Splits a global batch.

    Returns:
        The batch with a `PerReplica` of its rows in the place of each array, and the
        replicas' weights. A replica without rows gets a stand-in, the first row, and
        the weight 0: some metrics cannot take a batch of 0 rows.
    """
    rows = rows_of(batch)
    if rows == 0:
        raise ValueError("A batch must have 1 row or more. Received a batch of 0 rows.")
    bounds = split_rows(rows, replicas)

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


def _rows_in_order(outputs: Any, strategy: Any, weights: list[float]) -> Any:
    def gather(value):
        if not isinstance(value, PerReplica):
            return value
        pairs = zip(value.values, weights, strict=True)
        values = [component for component, weight in pairs if weight > 0]
        return strategy.extended.group.gather(values, axis=0)

    return tree.map_structure(gather, outputs)
