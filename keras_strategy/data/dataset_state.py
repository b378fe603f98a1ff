"""Where the sources of a distributed dataset are, and how they are put there again.

A source that knows where it is says so: by `state_dict` and `load_state_dict`, as those
of torchdata and Hugging Face, or by `get_state` and `set_state`, as grain's iterators
do. The batches of a `PyDataset` are known by their numbers. Any other source is read
forward from its beginning.

What is read ahead of the loop is no part of the place: see `Prefetcher`.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from keras_strategy.data.sources import IndexedStart, OneShotStart

logger = logging.getLogger("keras_strategy")
_PROTOCOLS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))


class SourceStates:
    """What a distributed dataset is read from.

    Args:
        datasets: The datasets.
        starts: What starts to read each of them.
        turns: How many batches of each make up an element.

    Attributes:
        given: Where they were when the last element was read that a loop was given, if
            they may be further by now.
        held: Where they are for who asks, if an element was read for another reason.
    """

    def __init__(
        self,
        datasets: Sequence[Any],
        starts: Sequence[Callable[..., Iterator[Any]]],
        turns: int = 1,
    ):
        self._all = [_Source(*pair) for pair in zip(datasets, starts, strict=True)]
        self._turns = turns
        self.given: list[Any] | None = None
        self.held: list[Any] | None = None

    @property
    def has_pending_restore(self) -> bool:
        """Whether they have been put somewhere, and are not read from there yet."""
        return any(source.resume is not None for source in self._all)

    @property
    def begun(self) -> int:
        """The element with which the reading that began last begins."""
        return self._all[0].begun // self._turns

    def start(self) -> list[Iterator[Any]]:
        """Starts to read them, where they have been put if they were."""
        self.given = self.held = None
        return [source.start() for source in self._all]

    def here(self) -> list[Any]:
        """Where they are, with what was read ahead."""
        return [source.here() for source in self._all]

    def state(self) -> dict[str, Any]:
        """See `DistributedDataset.state_dict`."""
        return {"sources": self.held or self.given or self.here()}

    def put(self, state: dict[str, Any]) -> None:
        """See `DistributedDataset.load_state_dict`.

        Raises:
            ValueError: If it is the state of another dataset.
        """
        places = state.get("sources") if isinstance(state, dict) else None
        if not isinstance(places, list) or len(places) != len(self._all):
            raise ValueError(
                "Argument `state` must be what `state_dict` gave for the same dataset, "
                f"which is read from {len(self._all)} sources. Received: {state!r}"
            )
        self.given = self.held = None
        for source, place in zip(self._all, places, strict=True):
            source.resume = place


@dataclass
class _Pass:
    """How far a source has been read from its beginning."""

    batches: int
    ended: bool = False


class _Source:
    """One of the sources.

    Attributes:
        resume: Where the next reading begins, of what `here` gives; None for the
            beginning.
        begun: The batch with which the last one has begun.
    """

    def __init__(self, dataset: Any, start: Callable[..., Iterator[Any]]):
        self._dataset, self._start = dataset, start
        self._knows = dataset if _protocol(dataset) else None
        self._passes: list[_Pass] = []
        self.resume: dict[str, Any] | None = None
        self.begun = 0

    def start(self) -> Iterator[Any]:
        """Starts to read it."""
        place, self.resume = self.resume, None
        if place is not None:
            iterator = self._go_on(place)
        else:
            self.begun, iterator = 0, self._start()
            if isinstance(self._start, OneShotStart) and self._passes:
                return self._counted(iterator, self._passes[-1])
        if self._knows is not self._dataset:
            self._knows = iterator if _protocol(iterator) else None
        self._passes.append(_Pass(self.begun))
        return self._counted(iterator, self._passes[-1])

    def here(self) -> dict[str, Any]:
        """Where it is, of JSON's values but what the source says itself."""
        if self.resume is not None:
            return self.resume
        *before, now = self._passes or [_Pass(0)]
        passes: list[int | None] = []
        state = None
        if self._knows is None:
            # How many batches were read of each, and None for all.
            known = [*before, now] if now.ended else before
            passes = [None if each.ended else each.batches for each in known]
        elif self._knows is self._dataset or not now.ended:
            state = _protocol(self._knows)[0]()
        batch = 0 if now.ended else now.batches
        return {"batch": batch, "passes": passes, "state": state}

    def _go_on(self, place: dict[str, Any]) -> Iterator[Any]:
        start, state = self._start, place["state"]
        self.begun, passes = place["batch"], place["passes"]
        self._passes = [_Pass(n or 0, ended=n is None) for n in passes]
        if isinstance(start, OneShotStart):
            start.forget()
        if _protocol(self._dataset) and state is not None:
            _protocol(self._dataset)[1](state)
            return start(self.begun) if isinstance(start, IndexedStart) else start()
        if isinstance(start, IndexedStart):
            start.skip_epochs(passes)
            return start(self.begun)
        if state is None:
            self._read_forward(passes)
        iterator = start()
        if state is None:
            _leave_out(iterator, self.begun)
        elif _protocol(iterator):
            _protocol(iterator)[1](state)
        else:
            raise ValueError(
                "The dataset was put where another one was that says itself where it "
                f"is. Received: a dataset of type {type(self._dataset).__name__}"
            )
        return iterator

    def _read_forward(self, passes: list[int | None]) -> None:
        """Reads what was read before the pass that goes on."""
        if passes or self.begun:
            logger.info(
                "A dataset of type %s goes on with batch %d of pass %d. It does not "
                "say where it is (`state_dict`), so it is read again up to there.",
                type(self._dataset).__name__,
                self.begun,
                len(passes),
            )
        for count in passes:
            _leave_out(self._start(), count)

    @staticmethod
    def _counted(iterator: Iterator[Any], now: _Pass) -> Iterator[Any]:
        for batch in iterator:
            now.batches += 1
            yield batch
        now.ended = True


def _leave_out(batches: Iterator[Any], count: int | None) -> None:
    deque(islice(batches, count), maxlen=0)


def has_state(source: Any) -> bool:
    """Whether a source knows how far it was read."""
    return _protocol(source) is not None


def _protocol(source: Any) -> Any:
    """The functions that get and set where a source is, or None."""
    for names in _PROTOCOLS:
        found = [getattr(source, name, None) for name in names]
        if all(map(callable, found)):
            return found
    return None
