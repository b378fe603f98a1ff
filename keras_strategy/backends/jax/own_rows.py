"""Patches of Keras's data adapters on JAX, and batches of each worker's local rows."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.experimental.sparse import JAXSparse
from keras import tree

from keras_strategy.backends.jax.distribution import ReplicaDistribution, put
from keras_strategy.backends.jax.sharded import local_shards
from keras_strategy.backends.jax.workers import JaxWorkers
from keras_strategy.errors import WorkerInputError
from keras_strategy.input.own_rows import LocalRows

logger = logging.getLogger("keras_strategy")


class GlobalBatches:
    """Iterator of global batches that are made of each worker's local rows.

    If all workers have equally many rows, and their devices divide them, each worker
    puts its rows on its own devices. Otherwise the rows are gathered, because an XLA
    program has one shape on all devices.
    """

    def __init__(self, batches: Iterable[LocalRows], distribution: ReplicaDistribution):
        self._batches = iter(batches)
        self._distribution = distribution
        self._consumed: list[LocalRows] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        rows = next(self._batches)
        self._consumed.append(rows)
        if any(isinstance(leaf, JAXSparse) for leaf in tree.flatten(rows.batch)):
            raise WorkerInputError(
                "On JAX, each worker's local batches must consist of dense arrays: the "
                "entries of a sparse array are in no order of rows."
            )
        cluster = self._distribution.cluster
        assert rows.worker_rows is not None and cluster is not None
        if _is_even(rows, self._distribution):
            return self._distribution.place_batch(rows)
        self._distribution.warn_gathered_rows(rows.worker_rows)
        workers = JaxWorkers(cluster, self._distribution)
        count = rows.worker_rows[workers.rank]

        def gather(leaf):
            if leaf is None:
                return None
            return np.asarray(workers.gather("rows", leaf[:count], 0)[0])

        return self._distribution.place_batch(tree.map_structure(gather, rows.batch))

    def pop_consumed(self) -> list[LocalRows]:
        """Return the batches consumed since the last call."""
        consumed, self._consumed = self._consumed, []
        return consumed


def _is_even(rows: LocalRows, distribution: ReplicaDistribution) -> bool:
    """Return True if the workers' rows form a global batch without communication."""
    assert rows.worker_rows is not None
    return len(set(rows.worker_rows)) == 1 and not rows.worker_rows[0] % len(distribution.devices)


def local_predictions(
    distribution: ReplicaDistribution, batches: Sequence[LocalRows], predictions: Any
) -> Any:
    """Return the predictions of this worker's rows.

    Args:
        distribution: The distribution of all replicas.
        batches: The predicted batches.
        predictions: The predictions of all rows, batch after batch.
    """
    total = sum(rows.global_rows for rows in batches)
    if not hasattr(predictions, "shape") or predictions.shape[:1] != (total,):
        raise ValueError(
            "If workers read local rows, `predict` returns the predictions of these "
            "rows to each worker, so each output must have one row for each row of the "
            "batch. Received an output of shape "
            f"{getattr(predictions, 'shape', ())} for {total} rows."
        )
    if len(batches) == 1 and _is_even(batches[0], distribution):
        parts = local_shards(put(predictions, distribution.split), distribution)
        return np.concatenate(list(map(np.asarray, parts)))
    predictions = np.asarray(put(predictions, distribution.everywhere))
    parts, offset = [], 0
    for rows in batches:
        first, end = rows.bounds[0][0], rows.bounds[-1][1]
        parts.append(predictions[offset + first : offset + end])
        offset += rows.global_rows
    return np.concatenate(parts)
