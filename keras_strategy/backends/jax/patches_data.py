"""Patches of Keras's batch iterators on JAX, and batches of local rows."""

import functools
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.sparse import JAXSparse
from keras import tree
from keras.src.trainers.data_adapters import data_adapter_utils

from keras_strategy.backends.jax.distribution import (
    ReplicaDistribution,
    current_distribution,
    put,
)
from keras_strategy.core.step_state import LocalRows
from keras_strategy.errors import WorkerInputError
from keras_strategy.keras_patches.data_adapters import (
    has_local_batches,
    join_batches,
    read_ahead,
    read_local_rows,
    synchronize,
)
from keras_strategy.keras_patches.patch import find_module, hook

logger = logging.getLogger("keras_strategy")


class GlobalBatches:
    """Iterator of global batches that are made of each worker's local rows."""

    def __init__(
        self,
        batches: Iterable[LocalRows],
        distribution: ReplicaDistribution,
        steps: int = 1,
    ):
        self._batches = iter(batches)
        self._distribution, self._steps = distribution, steps
        self._consumed: list[LocalRows] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._steps == 1:
            return self._next_batch()
        batches = _take(iter(self._next_batch, None), self._steps)
        if not batches:
            raise StopIteration
        return batches

    def _next_batch(self) -> Any:
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
        # Gather the rows: an XLA program has one shape everywhere.
        if not self._distribution.warned_gathered:
            self._distribution.warned_gathered = True
            logger.warning(
                "The rows of a step that the workers have read are sent to all workers "
                "(%s): a JAX program needs equally many rows on each device. The "
                "result is correct. To avoid the transfer, give each worker batches of "
                "the same number of rows, a multiple of %d.",
                cluster.format_by_worker(rows.worker_rows),
                len(self._distribution.devices),
            )
        workers = self._distribution.workers
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
    first, devices = rows.worker_rows[0], len(distribution.devices)
    return first % devices == 0 and set(rows.worker_rows) == {first}


def local_predictions(
    distribution: ReplicaDistribution, batches: Sequence[LocalRows], predictions: Any
) -> Any:
    """Return this worker's part of the predictions of all rows, batch after batch."""
    total = sum(rows.global_rows for rows in batches)
    if not hasattr(predictions, "shape") or predictions.shape[:1] != (total,):
        raise ValueError(
            "If workers read local rows, `predict` returns the predictions of these "
            "rows to each worker, so each output must have one row for each row of the "
            "batch. Received an output of shape "
            f"{getattr(predictions, 'shape', ())} for {total} rows."
        )
    if len(batches) == 1 and _is_even(batches[0], distribution):
        parts = distribution.local_shards(put(predictions, distribution.split))
        return np.concatenate(list(map(np.asarray, parts)))
    predictions = np.asarray(put(predictions, distribution.everywhere))
    parts, offset = [], 0
    for rows in batches:
        first, end = rows.bounds[0][0], rows.bounds[-1][1]
        parts.append(predictions[offset + first : offset + end])
        offset += rows.global_rows
    return np.concatenate(parts)


jax_trainer = find_module(
    "JAXEpochIterator _distribute_data", "keras.src.backend.jax.trainer"
)

# Since Keras 3.16 an iterator may yield several batches, of which each is one step.
PartialBatchList: Any = getattr(data_adapter_utils, "PartialBatchList", None)
_METHOD, _DATA = (
    ("_get_iterator", "(self)"),
    "(data, layouts=None, is_super_batch=False)",
)
if PartialBatchList is None:
    _METHOD = "_get_distributed_iterator", "(self, distribution)"
    _DATA = "(data, layouts=None)"


@hook(jax_trainer.JAXEpochIterator, *_METHOD, when=current_distribution)
def _get_batches(original, ours, self, *distribution):
    """Compute a layout for every batch, and let each worker read only its rows."""
    # Keras up to 3.15 uses the layout of the first batch, which a smaller last batch
    # may not fit. Keras 3.16 stacks the batches of `steps_per_execution` steps.
    steps = 1 if PartialBatchList is None else self.steps_per_execution
    if has_local_batches(self):
        batches = join_batches(
            self,
            read_ahead(self, self.data_adapter.get_jax_iterator()),
            ours.cluster,
            len(ours.devices),
            same_shapes=True,
        )
        return GlobalBatches(batches, ours, steps)
    if ours.cluster is None and ours.per_device is None and steps > 1:
        return ours.warn_uneven(original(self), steps_in_front=True)
    batches = _local_row_batches(self.data_adapter, ours)
    batches = batches or self.data_adapter.get_jax_iterator()
    if ours.cluster is not None:
        batches = synchronize(self, read_ahead(self, batches), ours.cluster)
    placed = map(ours.place_batch, ours.warn_uneven(batches))
    if steps > 1:
        return iter(functools.partial(_take, placed, steps), [])
    prefetched = placed if ours.cluster is not None else read_ahead(self, placed)
    if prefetched is not placed or jax.default_backend() == "cpu":
        return prefetched
    return _prefetch_one(placed)


def _take(batches: Iterator[Any], steps: int) -> list[Any]:
    """Return the next batches, which Keras uses in one step each."""
    return PartialBatchList(itertools.islice(batches, steps))


def _prefetch_one(batches: Iterator[Any]) -> Iterator[Any]:
    """Start moving a batch to the devices while they compute the previous one."""
    pending = []
    for batch in batches:
        pending.append(batch)
        if len(pending) > 1:
            yield pending.pop(0)
    yield from pending


def _local_row_batches(adapter: Any, distribution: Any) -> Any:
    if distribution.cluster is None or distribution.replicas == 1:
        return None
    local, replicas = distribution.topology.local_replicas, distribution.replicas

    def local_bounds(rows):
        size, uneven = divmod(rows, replicas)
        if uneven:  # every device computes all rows
            return [(0, rows)]
        return [(replica * size, (replica + 1) * size) for replica in local]

    return read_local_rows(
        adapter, local_bounds, lambda adapter: adapter.get_jax_iterator()
    )


@hook(jax_trainer, "_distribute_data", _DATA, when=current_distribution)
def _distribute_data(original, ours, data, layouts=None, **kind):
    """Place sparse matrices, which Keras cannot, and others in half the time."""
    return ours.place_batch(data, kind.get("is_super_batch", False))
