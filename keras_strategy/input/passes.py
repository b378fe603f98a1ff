"""Passes over one dataset, each in the order of the epoch that it began in."""

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import keras

_END = object()


class _Reading(threading.local):
    """The dataset that this thread reads in one order, and the epoch of that order."""

    dataset: "EpochOrderedDataset | None" = None
    epoch = 0


_reading = _Reading()


class EpochOrderedDataset(keras.utils.PyDataset):
    """A dataset that counts epochs, and has another order in each.

    Its passes need not follow each other: a thread may read ahead of an epoch's end,
    and two loops may read the dataset at once. The rows of a pass must not follow from
    what another one has come to.
    """

    _epoch = 0

    @property
    def epoch(self) -> int:
        """The epoch that who asks reads: of its pass, else the one that comes next."""
        return _reading.epoch if _reading.dataset is self else self._epoch

    def iterate_in_epoch_order(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Gives batches of this dataset in the order that their first one had.

        Args:
            batches: What reads this dataset when it is asked for a batch.
        """
        epoch = self._epoch
        iterator = iter(batches)
        while True:
            outer = _reading.dataset, _reading.epoch
            _reading.dataset, _reading.epoch = self, epoch
            try:
                batch = next(iterator, _END)
            finally:
                _reading.dataset, _reading.epoch = outer
            if batch is _END:
                return
            yield batch
