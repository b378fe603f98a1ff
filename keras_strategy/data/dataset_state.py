"""Positions of a distributed dataset's sources: how to save and restore them.

A source that can report its position does so itself: by `state_dict` and
`load_state_dict` (torchdata, Hugging Face), or by `get_state` and `set_state` (grain's
iterators). A `PyDataset` is restored by batch index. Any other source is read again
from its beginning up to its position.

Prefetched batches do not count as read: see `Prefetcher`.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from keras_strategy.data.sources import OneShotReader, PyDatasetReader

logger = logging.getLogger("keras_strategy")
_PROTOCOLS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))


class SourceStates:
    """Sources of a distributed dataset, with their positions.

    Args:
        datasets: The datasets to read.
        starts: A function for each of them that starts reading it.
        turns: How many batches of each make up an element.

    Attributes:
        consumed: Positions after the last element that a loop received, where
            prefetching has read further; else None.
        before_peek: Positions before an element that was read for its spec only.
    """

    def __init__(
        self,
        datasets: Sequence[Any],
        starts: Sequence[Callable[..., Iterator[Any]]],
        turns: int = 1,
    ):
        self._sources = [_Source(*pair) for pair in zip(datasets, starts, strict=True)]
        self._turns = turns
        self.consumed: list[Any] | None = None
        self.before_peek: list[Any] | None = None

    @property
    def has_pending_restore(self) -> bool:
        """True if a state was loaded and no iteration has started from it yet."""
        return any(source.restore_from is not None for source in self._sources)

    @property
    def first_element(self) -> int:
        """The index of the first element of the latest iteration."""
        return self._sources[0].first_batch // self._turns

    def start(self) -> list[Iterator[Any]]:
        """Start reading all sources, from a restored position if there is one."""
        self.consumed = self.before_peek = None
        return [source.start() for source in self._sources]

    def current(self) -> list[Any]:
        """Return the positions, prefetched batches included."""
        return [source.position() for source in self._sources]

    def state(self) -> dict[str, Any]:
        """Return the value of `DistributedDataset.state_dict`."""
        return {"sources": self.before_peek or self.consumed or self.current()}

    def restore(self, state: dict[str, Any]) -> None:
        """Have the next iteration start from `state`.

        Raises:
            ValueError: If it is the state of another dataset.
        """
        positions = state.get("sources") if isinstance(state, dict) else None
        if not isinstance(positions, list) or len(positions) != len(self._sources):
            raise ValueError(
                "Argument `state` must be what `state_dict` returned for the same "
                f"dataset, which is read from {len(self._sources)} sources. Received: "
                f"{state!r}"
            )
        self.consumed = self.before_peek = None
        for source, position in zip(self._sources, positions, strict=True):
            source.restore_from = position


@dataclass
class _Pass:
    """Progress of one iteration over a source."""

    batches: int
    ended: bool = False


class _Source:
    """One source and its position.

    Attributes:
        restore_from: The position at which the next iteration starts; None for the
            beginning.
        first_batch: The index of the first batch of the latest iteration.
    """

    def __init__(self, dataset: Any, start: Callable[..., Iterator[Any]]):
        self._dataset, self._start = dataset, start
        # The dataset or its iterator, whichever reports its own position.
        self._stateful = dataset if has_state(dataset) else None
        self._passes: list[_Pass] = []
        self.restore_from: dict[str, Any] | None = None
        self.first_batch = 0

    def start(self) -> Iterator[Any]:
        position, self.restore_from = self.restore_from, None
        if position is not None:
            iterator = self._resume(position)
        else:
            self.first_batch, iterator = 0, self._start()
            if isinstance(self._start, OneShotReader) and self._passes:
                return self._counted(iterator, self._passes[-1])
        if self._stateful is not self._dataset:
            self._stateful = iterator if has_state(iterator) else None
        self._passes.append(_Pass(self.first_batch))
        return self._counted(iterator, self._passes[-1])

    def position(self) -> dict[str, Any]:
        """Return JSON values, apart from the source's own state."""
        if self.restore_from is not None:
            return self.restore_from
        *before, now = self._passes or [_Pass(0)]
        passes: list[int | None] = []
        state = None
        if self._stateful is None:
            # The number of batches read in each pass, None for a complete one.
            past = [*before, now] if now.ended else before
            passes = [None if each.ended else each.batches for each in past]
        elif self._stateful is self._dataset or not now.ended:
            state = _state_methods(self._stateful)[0]()
        batch = 0 if now.ended else now.batches
        return {"batch": batch, "passes": passes, "state": state}

    def _resume(self, position: dict[str, Any]) -> Iterator[Any]:
        start, state = self._start, position["state"]
        self.first_batch, passes = position["batch"], position["passes"]
        self._passes = [_Pass(n or 0, ended=n is None) for n in passes]
        if isinstance(start, OneShotReader):
            start.reset_prefetch()
        if has_state(self._dataset) and state is not None:
            _state_methods(self._dataset)[1](state)
            if isinstance(start, PyDatasetReader):
                return start(self.first_batch)
            return start()
        if isinstance(start, PyDatasetReader):
            start.skip_epochs(passes)
            return start(self.first_batch)
        if state is None:
            self._reread(passes)
        iterator = start()
        if state is None:
            _skip(iterator, self.first_batch)
        elif has_state(iterator):
            _state_methods(iterator)[1](state)
        else:
            raise ValueError(
                "The state belongs to a dataset that reports its own position, and "
                "this one does not. Received: a dataset of type "
                f"{type(self._dataset).__name__}"
            )
        return iterator

    def _reread(self, passes: list[int | None]) -> None:
        """Read again what was read before the pass to resume."""
        if passes or self.first_batch:
            logger.info(
                "A dataset of type %s resumes at batch %d of pass %d. It does not "
                "report its position (`state_dict`), so it is read again up to there.",
                type(self._dataset).__name__,
                self.first_batch,
                len(passes),
            )
        for count in passes:
            _skip(self._start(), count)

    @staticmethod
    def _counted(iterator: Iterator[Any], now: _Pass) -> Iterator[Any]:
        for batch in iterator:
            now.batches += 1
            yield batch
        now.ended = True


def _skip(batches: Iterator[Any], count: int | None) -> None:
    deque(islice(batches, count), maxlen=0)


def has_state(source: Any) -> bool:
    """Return True if a source can report and restore its position."""
    return _state_methods(source) is not None


def _state_methods(source: Any) -> Any:
    """Return the methods that get and set a source's state, or None."""
    for names in _PROTOCOLS:
        methods = [getattr(source, name, None) for name in names]
        if all(map(callable, methods)):
            return methods
    return None
