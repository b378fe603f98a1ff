"""The steps of `fit`, `evaluate` and `predict` on global batches.

A batch is split by rows, the model's step runs on every replica with its row weight,
and what the replicas return is merged. Backends override what differs there.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops, tree

from keras_strategy.core.protocols import Strategy
from keras_strategy.core.step_state import LocalRows, RowRange
from keras_strategy.training.row_weights import limits_for, local_bounds
from keras_strategy.training.train_step import (
    average_logs,
    count_array_rows,
    make_weighted_step,
    returns_only_metrics,
)
from keras_strategy.values import DistributedValues, PerReplica, map_leaves


def arrays_of(batch: Any) -> Any:
    """Return the arrays of a batch or of a worker's rows of it."""
    return batch.batch if isinstance(batch, LocalRows) else batch


@dataclass(frozen=True)
class LocalBatch:
    """The local batch of a replica; a leaf for Keras's trees."""

    data: Any
    weight: Any
    rows: Any  # its `RowRange`; None if unknown


class BatchFunction:
    """A train, test or predict function: runs a model's step on the replicas."""

    # `layers` returns the model's layers. Only `run_batches` needs a policy: the
    # `RowPolicy` that audits the step.

    def __init__(
        self,
        model: keras.Model,
        kind: str,
        strategy: Strategy,
        step: Callable[[Any], Any],
        layers: Callable[[], Sequence[Any]],
        policy: Any = None,
    ):
        self._model, self._kind, self._strategy = model, kind, strategy
        self._group: Any = strategy.extended.group
        self.policy = policy
        self._returns_metrics = returns_only_metrics(model, kind)
        count_rows = self._count_rows if kind == "predict" else None
        self._weighted_step = make_weighted_step(
            step, self._returns_metrics, layers, self._require, count_rows
        )
        self._step: Any = self._call_step

    def run_batches(self, batches: Iterable[Any]) -> Any:
        """Run a step on each batch; return the last logs, or all predictions."""
        outputs = [self._audit_and_run(batch) for batch in batches]
        if self._kind == "predict" and len(outputs) > 1:
            return tree.map_structure(lambda *parts: ops.concatenate(parts), *outputs)
        return outputs[-1]

    def _audit_and_run(self, batch: Any) -> Any:
        if not self.policy.is_done and self.policy.is_due():
            self.policy.audit(self._to_host(batch))
        runs_whole = self.policy.runs_whole
        return self._run_whole(batch) if runs_whole else self.run_batch(batch)

    def _to_host(self, batch: Any) -> Any:
        """Return a batch for the audit."""
        return batch

    def _run_whole(self, batch: Any) -> Any:
        """Run the step on all rows of a batch at once."""
        raise NotImplementedError

    def run_batch(self, batch: Any) -> Any:
        """Run the step on a global batch; return merged logs, or predictions."""
        local_batches, weights = self._split(batch)
        outputs = self._run_replicas(local_batches)
        if self._kind != "predict":
            return self._merge_logs(outputs, weights)
        is_global = not isinstance(batch, LocalRows) or batch.worker_rows is None

        def join(value):
            if not isinstance(value, DistributedValues):
                return value
            return self._join_rows(value, weights, is_global)

        return tree.map_structure(join, outputs)

    def _split(self, batch: Any) -> tuple[Any, list[Any]]:
        """Return a batch, or this worker's rows of it, by replica, and row weights."""
        # A replica without rows gets a stand-in row and the weight 0: some metrics do
        # not accept a batch of 0 rows, and some kernels of TensorFlow abort on it.
        data = arrays_of(batch)
        rows = self._count_rows(tree.flatten(data))
        if isinstance(rows, int) and rows == 0:
            raise ValueError(
                "A batch must have 1 row or more. Received a batch of 0 rows."
            )
        if isinstance(batch, LocalRows):
            bounds, total = batch.bounds, batch.global_rows
            first = bounds[0][0]
        else:
            topology, total, first = self._strategy.extended.topology, rows, 0
            bounds = local_bounds(topology, total)
        minimum, maximum = limits_for(total)

        def make_local_batch(replica, begin, end):
            weight = (end - begin) / total
            begin = minimum(begin, first + rows - 1)
            end = maximum(end, begin + 1)
            part = replica, begin - first, end - first
            return LocalBatch(
                map_leaves(functools.partial(self._slice, *part), data),
                weight,
                RowRange(minimum(begin, total - 1), end - begin, total),
            )

        local = [make_local_batch(i, *b) for i, b in enumerate(bounds)]
        return PerReplica(local), [local_batch.weight for local_batch in local]

    def _count_rows(self, arrays: Sequence[Any]) -> Any:
        return count_array_rows(arrays)

    def _slice(self, replica: int, begin: Any, end: Any, array: Any) -> Any:
        """Return rows of an array for one of the local replicas; None for None."""
        return None if array is None else array[begin:end]

    def _run_replicas(self, local_batches: Any) -> Any:
        return self._strategy.run(self._step, args=(local_batches,))

    def _call_step(self, local: Any) -> Any:
        """Run the step on a replica."""
        return self._weighted_step(local.data, local.weight, local.rows)

    def _require(self, condition: Any, message: str) -> Any:
        """Raise `ValueError` unless a condition holds when it executes."""
        if not condition:
            raise ValueError(message)

    def _merge_logs(self, logs: Any, weights: list[Any]) -> Any:
        if self._returns_metrics:
            return self._model.get_metrics_result()
        return average_logs(logs, weights, self._group.sum_logs)

    def _join_rows(
        self, value: DistributedValues, weights: list[Any], is_global: bool
    ) -> Any:
        """Join the predictions of all workers' rows, or of this worker's."""
        pairs = zip(value.values, weights, strict=True)
        # A worker without rows takes part in the gather, too.
        parts = [x for x, weight in pairs if weight > 0] or [value.values[0][:0]]
        return self._group.gather(parts, 0) if is_global else ops.concatenate(parts)
