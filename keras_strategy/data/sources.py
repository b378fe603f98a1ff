"""Readers of every kind of dataset that `fit` takes, and the positions of sources.

A source that can report its position does so itself: by `state_dict` and
`load_state_dict` (torchdata, Hugging Face), or by `get_state` and `set_state` (grain's
iterators). A `PyDataset` is restored by batch index. Any other source is read again
from its beginning up to its position. Prefetched batches do not count as read: see
`Prefetcher`.

Objects of TensorFlow, torch and other libraries are recognised by their type's name or
in `sys.modules`: importing a library only to ask would cost seconds and memory.

While a step computes, a thread reads the next batch. Only the source can notice, if its
batches depend on what training does meanwhile: on process-wide random numbers, or on
what a callback sets. So without an option, only sources that promise not to are
prefetched: see `splitting`.
"""

import contextlib
import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
from keras import tree

from keras_strategy.core.registry import get_engine
from keras_strategy.core.step_state import LocalRows, override
from keras_strategy.errors import logger

_STATE_PROTOCOLS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))


def batches_of(dataset: Any, argument: str) -> Callable[[], Iterator[Any]]:
    """Return a function that starts reading a dataset from its beginning."""
    if is_tf_dataset(dataset):
        return lambda: iter(dataset.as_numpy_iterator())
    if isinstance(dataset, keras.utils.PyDataset):
        return PyDatasetReader(dataset, dataset.__getitem__)
    if isinstance(dataset, Iterator):
        return OneShotReader(dataset, argument)
    is_batch = isinstance(dataset, str | bytes | tuple | Mapping)
    is_batch = is_batch or hasattr(dataset, "shape")
    is_iterable = isinstance(dataset, Iterable) or hasattr(dataset, "__getitem__")
    if is_iterable and not is_batch:
        return lambda: iter(dataset)
    raise TypeError(
        f"{argument} must be a dataset of batches: a tf.data.Dataset, a torch "
        "DataLoader, a keras.utils.PyDataset, a list of batches, or another iterable "
        "that gives one batch (arrays, or a tuple or dict of them) at a time. "
        f"Received: {_short(dataset)} of type {type(dataset).__name__}"
    )


def is_tf_dataset(dataset: Any) -> bool:
    return any(
        parent.__name__ == "DatasetV2" and parent.__module__.startswith("tensorflow.")
        for parent in type(dataset).__mro__
    )


def number_of_batches(dataset: Any) -> int | None:
    """Return the number of batches, None if it is unknown or infinite."""
    try:
        if isinstance(dataset, keras.utils.PyDataset):
            return dataset.num_batches
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def has_fixed_shapes(dataset: Any) -> bool:
    """Return True if a dataset declares that all its elements have the same shapes."""
    if not is_tf_dataset(dataset):
        return False
    shapes = [getattr(s, "shape", None) for s in tree.flatten(dataset.element_spec)]
    return all(shape is not None and shape.is_fully_defined() for shape in shapes)


def as_array(leaf: Any, argument: str) -> Any:
    """Convert a leaf of a batch to a tensor of the backend or a NumPy array."""
    if type(leaf) is np.ndarray:  # the common case
        return leaf
    if leaf is None or get_engine().is_tensor(leaf):
        return leaf
    if hasattr(leaf, "detach") and hasattr(leaf, "cpu"):  # a torch tensor
        return leaf.detach().cpu().numpy()
    if hasattr(leaf, "__array__") or isinstance(leaf, bool | int | float | complex):
        return np.asarray(leaf)
    raise TypeError(
        f"Expected a batch of arrays from {argument}. Received a batch that holds "
        f"{_short(leaf)} of type {type(leaf).__name__}"
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class PyDatasetReader:
    """Reader that starts a `PyDataset` at any batch; `read` returns one by index."""

    def __init__(self, dataset: keras.utils.PyDataset, read: Callable[[int], Any]):
        self._dataset = dataset
        self._read = read

    def __call__(self, first: int = 0) -> Iterator[Any]:
        """Start an epoch at batch `first`."""
        dataset = self._dataset
        dataset.on_epoch_begin()
        number = number_of_batches(dataset)
        indices = itertools.count(first) if number is None else range(first, number)
        batches = map(self._read, indices)
        # Only an `IndexedDataset` has it.
        in_order = getattr(dataset, "iterate_in_epoch_order", None)
        yield from batches if in_order is None else in_order(batches)
        dataset.on_epoch_end()

    def skip_epochs(self, epochs: Sequence[int | None]) -> None:
        """Skip epochs without reading them: None for a complete one."""
        for batches in epochs:
            self._dataset.on_epoch_begin()
            if batches is None:
                self._dataset.on_epoch_end()


class OneShotReader:
    """Reader of an iterator or generator, which can be read only once."""

    def __init__(self, iterator: Iterator[Any], argument: str):
        self._source = self._iterator = iterator
        self._argument = argument
        self._ended = False

    def prefetch(self, depth: int) -> None:
        """Read ahead, for all iterations, unless the source reports its position."""
        if depth and not _state_methods(self._source):
            self._iterator = Prefetcher(map(copy_batch, self._source), depth)

    def __call__(self) -> Iterator[Any]:
        if self._ended:
            raise RuntimeError(
                f"{self._argument} was an iterator or a generator, which gives its "
                "batches once, and they have been read. Distribute a dataset that can "
                "be read again (a list, or an object whose `__iter__` starts anew), "
                f"or a new generator for each epoch. Received: {self._source!r}"
            )
        return self._read()

    def _read(self) -> Iterator[Any]:
        # Not `yield from`, which closes the generator together with its reader.
        for batch in self._iterator:  # noqa: UP028
            yield batch
        self._ended = True


class SourceStates:
    """Sources with positions; `turns` batches of each make up a dataset's element."""

    def __init__(
        self,
        datasets: Sequence[Any],
        starts: Sequence[Callable[..., Iterator[Any]]],
        turns: int = 1,
    ):
        self._sources = [_Source(*pair) for pair in zip(datasets, starts, strict=True)]
        self._turns = turns
        # Positions after the last element that a loop received, where prefetching has
        # read further.
        self.consumed: list[Any] | None = None
        # Positions before an element that was read for its spec only.
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
        """Have the next iteration start from `state`."""
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

    def count(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of an iterator, and count them."""
        for batch in iterator:
            self.batches += 1
            yield batch
        self.ended = True


class _Source:
    """One source and its position."""

    def __init__(self, dataset: Any, start: Callable[..., Iterator[Any]]):
        self._dataset, self._start = dataset, start
        # The dataset or its iterator, whichever reports its own position.
        self._stateful = dataset if _state_methods(dataset) else None
        self._passes: list[_Pass] = []
        # The position at which the next iteration starts; None for the beginning.
        self.restore_from: dict[str, Any] | None = None
        # The index of the first batch of the latest iteration.
        self.first_batch = 0

    def start(self) -> Iterator[Any]:
        position, self.restore_from = self.restore_from, None
        if position is not None:
            iterator = self._resume(position)
        else:
            self.first_batch, iterator = 0, self._start()
            if isinstance(self._start, OneShotReader) and self._passes:
                return self._passes[-1].count(iterator)
        if self._stateful is not self._dataset:
            self._stateful = iterator if _state_methods(iterator) else None
        self._passes.append(_Pass(self.first_batch))
        return self._passes[-1].count(iterator)

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
        restores_dataset = _state_methods(self._dataset) and state is not None
        if restores_dataset:
            _state_methods(self._dataset)[1](state)
        if isinstance(start, PyDatasetReader):
            if not restores_dataset:
                start.skip_epochs(passes)
            return start(self.first_batch)
        if restores_dataset:
            return start()
        if state is None:
            return self._reread(passes)
        iterator = start()
        if not _state_methods(iterator):
            raise ValueError(
                "The state belongs to a dataset that reports its own position, and "
                "this one does not. Received: a dataset of type "
                f"{type(self._dataset).__name__}"
            )
        _state_methods(iterator)[1](state)
        return iterator

    def _reread(self, passes: list[int | None]) -> Iterator[Any]:
        """Read again what was read before the position to resume at."""
        if passes or self.first_batch:
            logger.info(
                "A dataset of type %s resumes at batch %d of pass %d. It does not "
                "report its position (`state_dict`), so it is read again up to there.",
                type(self._dataset).__name__,
                self.first_batch,
                len(passes),
            )
        for count in passes:
            # Nothing refers to this iterator when the next one starts.
            deque(itertools.islice(self._start(), count), maxlen=0)
        iterator = self._start()
        deque(itertools.islice(iterator, self.first_batch), maxlen=0)
        return iterator


def _state_methods(source: Any) -> Any:
    """Return the methods that get and set a source's state, or None."""
    for names in _STATE_PROTOCOLS:
        methods = [getattr(source, name, None) for name in names]
        if all(map(callable, methods)):
            return methods
    return None


# --- prefetching

# Seconds that `Prefetcher.stop` waits for a batch that is being read.
_STOP_SECONDS = 3.0
_END = object()

Scope = Callable[[], AbstractContextManager[Any]]


class _ThreadState(threading.local):
    active: "set[Prefetcher] | None" = None
    disabled = False


_thread = _ThreadState()


class Prefetcher(Iterator[Any]):
    """Iterator that reads some items of another iterator ahead, in a thread."""

    # The first item is read in the requesting thread, and with it what begins an epoch,
    # such as drawing its row order. After any multiple of one of the epoch lengths
    # `pauses`, the next item is read only when it is requested. The `SourceStates` of
    # the items learn the position of each item returned.

    def __init__(
        self,
        items: Iterator[Any],
        depth: int,
        pauses: Sequence[int] = (),
        scope: Scope = contextlib.nullcontext,
        sources: SourceStates | None = None,
    ):
        self._items = items
        self._depth = depth
        self._pauses = pauses
        self._scope = scope
        self._pending: deque[Future] = deque()
        self._sources = sources
        self._num_returned = 0 if sources is None else sources.first_element
        self._ended = False
        self._pool: ThreadPoolExecutor | None = None

    def __next__(self) -> Any:
        if self._pending:
            try:
                item, state = self._pending[0].result()
            except Exception:
                self.stop()
                self._pending.popleft()
                raise
            # Only now: an interrupted caller finds the item again.
            self._pending.popleft()
        else:
            item, state = self._read_next()
        if self._sources is not None and state is not None:
            self._sources.consumed = state
        if item is _END:
            self._ended = True
            self.stop()
            raise StopIteration
        self._num_returned += 1
        self._submit_reads()
        return item

    def stop(self) -> None:
        """Stop the thread; later requests still get what it has read."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        if _thread.active is not None:
            _thread.active.discard(self)
        self._pending = deque(f for f in self._pending if not f.cancel())
        late = wait(self._pending, _STOP_SECONDS).not_done
        pool.shutdown(wait=not late)

    def _submit_reads(self) -> None:
        while (
            len(self._pending) < self._depth
            and not self._ended
            and not _thread.disabled
        ):
            num_read = self._num_returned + len(self._pending)
            if any(num_read % pause == 0 for pause in self._pauses):
                break
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, "keras_strategy prefetch")
                if _thread.active is not None:
                    _thread.active.add(self)
            self._pending.append(self._pool.submit(self._read_in_thread))
        if not self._pending:
            self.stop()

    def _read_in_thread(self) -> tuple[Any, Any]:
        try:
            with self._scope():
                item, state = self._read_next()
        except BaseException:
            self._ended = True
            raise
        self._ended = item is _END
        return item, state

    def _read_next(self) -> tuple[Any, Any]:
        if self._ended:
            return _END, None
        item = next(self._items, _END)
        return item, None if self._sources is None else self._sources.current()


@dataclass(frozen=True, eq=False)
class PrefetchedBatches:
    """Iterable that reads batches with a new `Prefetcher` in each iteration."""

    batches: Iterable[Any]
    depth: int
    pauses: Sequence[int]
    scope: Scope

    def __iter__(self) -> Iterator[Any]:
        return Prefetcher(iter(self.batches), self.depth, self.pauses, self.scope)


@contextlib.contextmanager
def stop_prefetchers_on_exit() -> Iterator[None]:
    active: set[Prefetcher] = set()
    with override(_thread, "active", active):
        try:
            yield
        finally:
            for prefetcher in list(active):
                prefetcher.stop()


# Context manager in which reading a batch starts no further reads.
prefetch_disabled = functools.partial(override, _thread, "disabled", True)


def copy_batch(batch: Any) -> Any:
    """Copy a batch whose source may refill the same arrays."""

    def copy(leaf):
        if isinstance(leaf, np.ndarray):
            return leaf.copy()
        if hasattr(leaf, "detach") and hasattr(leaf, "clone"):  # a torch tensor
            return leaf.detach().clone()
        if isinstance(leaf, LocalRows):
            return replace(leaf, batch=copy_batch(leaf.batch))
        return leaf

    return tree.map_structure(copy, batch)
