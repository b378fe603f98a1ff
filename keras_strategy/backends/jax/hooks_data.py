"""Patches of Keras's batch iterators on JAX."""

from collections.abc import Iterator
from typing import Any

import jax

from keras_strategy.backends.jax.in_charge import current_distribution
from keras_strategy.backends.jax.own_rows import GlobalBatches
from keras_strategy.hooks.data_adapters import (
    counts_of_arrays,
    is_own,
    joined,
    own_rows,
    pauses_after,
    read_ahead,
)
from keras_strategy.hooks.hook import home_of, hook
from keras_strategy.input.agreement import SynchronizedBatches

jax_trainer = home_of(
    "JAXEpochIterator _distribute_data", "keras.src.backend.jax.trainer"
)

if hasattr(jax_trainer.JAXEpochIterator, "_get_distributed_iterator"):
    # Up to Keras 3.15, where all batches get the layout of the first one.
    _DATA = "(data, layouts=None)"

    @hook(
        jax_trainer.JAXEpochIterator,
        "_get_distributed_iterator",
        "(self, distribution)",
        when=current_distribution,
    )
    def _get_distributed_iterator(original, ours, self, distribution):
        """Compute a layout for every batch.

        Keras uses that of the first batch, which a smaller last batch may not fit.
        """
        if is_own(self):
            return _global_batches(self, ours)
        batches = _local_row_batches(self.data_adapter, ours)
        batches = batches or self.data_adapter.get_jax_iterator()
        if ours.cluster is not None:
            batches = _until_any_ends(read_ahead(self, batches), self, ours)
        placed = map(ours.place_batch, ours.warn_uneven(batches))
        prefetched = placed if ours.cluster is not None else read_ahead(self, placed)
        if prefetched is not placed or jax.default_backend() == "cpu":
            return prefetched
        return _prefetch_one(placed)

else:
    _DATA = "(data, layouts=None, is_super_batch=False)"

    @hook(
        jax_trainer.JAXEpochIterator,
        "_get_iterator",
        "(self)",
        when=current_distribution,
    )
    def _get_iterator(original, ours, self):
        """Warn about batches that cannot be split evenly.

        These Keras versions compute a layout for every batch. They stack the batches of
        `steps_per_execution` steps along a new first axis.
        """
        if is_own(self):
            if self.steps_per_execution > 1:
                raise NotImplementedError(
                    "With this version of Keras, `steps_per_execution` must be 1 if "
                    "workers read local rows. Received: "
                    f"steps_per_execution={self.steps_per_execution}"
                )
            return _global_batches(self, ours)
        batches = _until_any_ends(original(self), self, ours)
        return ours.warn_uneven(batches, self.steps_per_execution > 1)


def _prefetch_one(batches: Iterator[Any]) -> Iterator[Any]:
    """Start moving a batch to the devices while they compute the previous one.

    Keras's equivalent has different names in different versions.
    """
    pending = []
    for batch in batches:
        pending.append(batch)
        if len(pending) > 1:
            yield pending.pop(0)
    yield from pending


def _local_row_batches(adapter: Any, distribution: Any) -> Any:
    """Return batches of only this worker's rows, or None.

    Batches that the devices do not divide are read and computed as a whole.
    """
    if distribution.cluster is None or distribution.replicas == 1:
        return None
    local, replicas = distribution.topology.local_replicas, distribution.replicas

    def local_bounds(rows):
        size, uneven = divmod(rows, replicas)
        if uneven:
            return [(0, rows)]
        return [(replica * size, (replica + 1) * size) for replica in local]

    return own_rows(adapter, local_bounds, lambda adapter: adapter.get_jax_iterator())


def _until_any_ends(batches: Any, iterator: Any, distribution: Any) -> Any:
    """Yield the batches until one of the workers has no more."""
    if distribution.cluster is None:
        return batches
    counts = counts_of_arrays(iterator.data_adapter)
    pauses = pauses_after(iterator, batches)
    return SynchronizedBatches(batches, distribution.cluster, counts, pauses, tells=True)


def _global_batches(iterator: Any, distribution: Any) -> GlobalBatches:
    """Return the global batches of the workers' local rows."""
    batches = joined(
        iterator,
        read_ahead(iterator, iterator.data_adapter.get_jax_iterator()),
        distribution.cluster,
        len(distribution.devices),
        same_shapes=True,
    )
    return GlobalBatches(batches, distribution)


@hook(jax_trainer, "_distribute_data", _DATA, when=current_distribution)
def _distribute_data(original, ours, data, layouts=None, **kind):
    """Place sparse matrices, which Keras cannot, and others in half the time."""
    return ours.place_batch(data, kind.get("is_super_batch", False))
