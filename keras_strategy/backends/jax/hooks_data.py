"""Where the JAX adapter extends Keras for the batches of `fit` and its like."""

from collections.abc import Iterator
from typing import Any

import jax

from keras_strategy.backends.jax.in_charge import distribution_in_charge
from keras_strategy.backends.jax.own_rows import OwnOnDevices
from keras_strategy.hooks.data_adapters import (
    counts_of_arrays,
    is_own,
    joined,
    own_rows,
    pauses_after,
    read_ahead,
)
from keras_strategy.hooks.hook import home_of, hook
from keras_strategy.input.agreement import AgreedBatches

jax_trainer = home_of(
    "JAXEpochIterator _distribute_data", "keras.src.backend.jax.trainer"
)

if hasattr(jax_trainer.JAXEpochIterator, "_get_distributed_iterator"):
    # Until Keras 3.15 it has the layout of the first batch for all.
    _DATA = "(data, layouts=None)"

    @hook(
        jax_trainer.JAXEpochIterator,
        "_get_distributed_iterator",
        "(self, distribution)",
        when=distribution_in_charge,
    )
    def _get_distributed_iterator(original, ours, self, distribution):
        """There is a layout for every batch.

        Keras keeps that of the first batch, which a smaller last one may not fit.
        """
        if is_own(self):
            return _joined(self, ours)
        batches = _own_rows(self.data_adapter, ours)
        batches = batches or self.data_adapter.get_jax_iterator()
        if ours.cluster is not None:
            batches = _agreed(read_ahead(self, batches), self, ours)
        placed = map(ours.place_batch, ours.noticing(batches))
        ahead = placed if ours.cluster is not None else read_ahead(self, placed)
        if ahead is not placed or jax.default_backend() == "cpu":
            return ahead
        return _one_ahead(placed)

else:
    _DATA = "(data, layouts=None, is_super_batch=False)"

    @hook(
        jax_trainer.JAXEpochIterator,
        "_get_iterator",
        "(self)",
        when=distribution_in_charge,
    )
    def _get_iterator(original, ours, self):
        """Batches that cannot be split are noticed.

        In the Keras versions that have a layout for every batch by themselves. There,
        the batches of `steps_per_execution` steps come as one, with the steps in front.
        """
        if is_own(self):
            if self.steps_per_execution > 1:
                raise NotImplementedError(
                    "With this version of Keras, `steps_per_execution` must be 1 where "
                    "workers read rows of their own. Received: "
                    f"steps_per_execution={self.steps_per_execution}"
                )
            return _joined(self, ours)
        batches = _agreed(original(self), self, ours)
        return ours.noticing(batches, self.steps_per_execution > 1)


def _one_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """Starts to move a batch to the devices while they compute the one before.

    Keras does so too, under a name that differs between its versions.
    """
    waiting = []
    for batch in batches:
        waiting.append(batch)
        if len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting


def _own_rows(adapter: Any, distribution: Any) -> Any:
    """The batches of which this worker reads its own rows alone, or None.

    Those that the devices do not divide are read whole, as they are computed.
    """
    if distribution.cluster is None or distribution.replicas == 1:
        return None
    local, replicas = distribution.topology.local_replicas, distribution.replicas

    def share(rows):
        each, uneven = divmod(rows, replicas)
        if uneven:
            return [(0, rows)]
        return [(replica * each, (replica + 1) * each) for replica in local]

    return own_rows(adapter, share, lambda adapter: adapter.get_jax_iterator())


def _agreed(batches: Any, iterator: Any, distribution: Any) -> Any:
    """The batches; of several workers, while all of them have one."""
    if distribution.cluster is None:
        return batches
    counts = counts_of_arrays(iterator.data_adapter)
    pauses = pauses_after(iterator, batches)
    return AgreedBatches(batches, distribution.cluster, counts, pauses, tells=True)


def _joined(iterator: Any, distribution: Any) -> OwnOnDevices:
    """The batches that the workers' own make together, on their devices."""
    batches = joined(
        iterator,
        read_ahead(iterator, iterator.data_adapter.get_jax_iterator()),
        distribution.cluster,
        len(distribution.devices),
        same_shapes=True,
    )
    return OwnOnDevices(batches, distribution)


@hook(jax_trainer, "_distribute_data", _DATA, when=distribution_in_charge)
def _distribute_data(original, ours, data, layouts=None, **kind):
    """Keras cannot place a sparse matrix on several devices.

    And takes twice as long for the others.
    """
    return ours.place_batch(data, kind.get("is_super_batch", False))
