"""The loop of `fit` over the batches of an epoch, which begins with any of them."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from keras_strategy.hooks.array_rows import epoch_of, set_epoch
from keras_strategy.hooks.data_adapters import leaving_out
from keras_strategy.hooks.data_states import DataState, TfDataState
from keras_strategy.hooks.hook import home_of, hook

EpochIterator: Any = home_of(
    "EpochIterator", "keras.src.trainers.epoch_iterator"
).EpochIterator


class _Place(threading.local):
    """Who reads the next batches in this thread."""

    expected: "Reading | None" = None


_place = _Place()


def _expected() -> "Reading | None":
    """The `fit` that is about to read an epoch's batches, if it is backed up."""
    return _place.expected


@hook(EpochIterator, "__iter__", "(self)", when=_expected)
def _iter(original, reading, self):
    """An epoch that was interrupted goes on with the batch that came next."""
    _place.expected = None
    reading.begin(self, original)
    return self


def forget() -> None:
    """Nobody is about to read an epoch's batches in this thread."""
    _place.expected = None


@dataclass(frozen=True)
class Position:
    """Where in its data a training is, of JSON's values.

    Attributes:
        batch: The batch of the epoch.
        read: How many batches were read since the data was begun to be read.
        before: The random state before that.
        begun: Whether it was begun to be read, and that was before `before`.
        now: The random state.
        orders: `epoch_of` the data's adapter before that and now.
    """

    batch: int
    read: int
    before: Any
    begun: bool
    now: Any
    orders: Sequence[int | None] = (None, None)


class Reading:
    """What one `fit` reads of its data.

    Args:
        random_state: Gives the state of all random generators.
        set_random_state: Sets it.
        data: Where its data is, if that can say it.

    Attributes:
        iterator: Keras's iterator, once the loop has begun to read.
    """

    def __init__(
        self,
        random_state: Callable[[], Any],
        set_random_state: Callable[[Any], None],
        data: DataState | TfDataState | None = None,
    ):
        self._random_state = random_state
        self._set_random_state = set_random_state
        self.iterator: Any = None
        self._before: Any = None
        self._order: int | None = None
        self._begun = False
        self._resumed: Position | None = None
        self._restore: Callable[[Any], None] | None = None
        self._data, self._told = data, None

    def expect(self) -> None:
        """The loop of this `fit` is the next that begins to read in this thread."""
        _place.expected = self

    def resume(
        self, position: Position, restore: Callable[[Any], None], told: Any
    ) -> None:
        """Has the next epoch go on.

        Args:
            position: Where.
            restore: Called with Keras's iterator before its first batch is read.
            told: What the data has said of itself there; None if it has not.
        """
        self._resumed, self._restore, self._told = position, restore, told

    def position(self, batch: int) -> Position:
        """Where it is, before a batch of the epoch."""
        iterator = self.iterator
        stays = (
            iterator.steps_per_epoch is not None
            and iterator._current_iterator is not None
        )
        read = iterator._steps_seen if batch or stays else 0
        begun = self._begun if read else stays
        orders = self._order, epoch_of(iterator.data_adapter)
        return Position(batch, read, self._before, begun, self._random_state(), orders)

    def told(self, position: Position) -> Any:
        """What the data says of itself, of JSON's values; None if it does not."""
        if self._data is None:
            return None
        return self._data.at(position.read, position.begun)

    def begin(self, iterator: Any, original: Callable[[Any], Any]) -> None:
        """Begins to read an epoch.

        Args:
            iterator: Keras's iterator, which goes on with what it has been reading if
                the steps of an epoch are given.
            original: Its method that begins.
        """
        self.iterator = iterator
        position, self._resumed = self._resumed, None
        if position is not None:
            self._go_on(iterator, original, position)
            return
        stays = (
            iterator.steps_per_epoch is not None
            and iterator._current_iterator is not None
        )
        if not (stays and iterator._steps_seen):
            self._before, self._begun = self._random_state(), stays
            self._order = epoch_of(iterator.data_adapter)
            if self._data is not None:
                self._data.begins(stays)
        original(iterator)

    def _go_on(
        self, iterator: Any, original: Callable[[Any], Any], position: Position
    ) -> None:
        assert self._restore is not None
        self._restore(iterator)
        steps, rest = divmod(position.batch, iterator.steps_per_execution)
        if rest:
            raise ValueError(
                f"The backup was made after {position.batch} batches of an epoch. That "
                "is no multiple of `steps_per_execution`. Received: "
                f"steps_per_execution={iterator.steps_per_execution}"
            )
        self._before, self._begun = position.before, position.begun
        (self._order, order), adapter = position.orders, iterator.data_adapter
        set_epoch(adapter, self._order if position.read else order)
        again = position.read
        if self._data is not None:
            again -= self._data.go_on(self._told)
        if position.read:
            self._set_random_state(position.before)
        if iterator.steps_per_epoch is not None and (position.begun or position.read):
            iterator._current_iterator = iter(iterator._get_iterator())
            if position.begun and position.read:
                self._set_random_state(position.before)
        original(iterator)
        with leaving_out(adapter, again):
            self._read_on(iterator, steps, again)
        iterator._steps_seen = position.read
        set_epoch(adapter, order)
        self._set_random_state(position.now)

    def _read_on(self, iterator: Any, steps: int, count: int) -> None:
        """Reads up to where the epoch goes on."""
        batches = iterator._current_iterator
        for _ in range(steps):
            *_, batches = next(iterator._epoch_iterator)
        for number in range(count):
            if next(batches, None) is None:
                raise ValueError(
                    f"The backup was made after {count} batches of the data, which has "
                    f"{number}. A training goes on with the data that it was "
                    "interrupted with."
                )
