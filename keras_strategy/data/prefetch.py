"""Batches that are read in a thread, before they are asked for.

While a step computes, the next batch is read. Nobody sees that but the source, if its
batches depend on what the training does meanwhile: on random numbers of the process, or
on what a callback sets. So what is read ahead unasked is what promises not to: see
`prefetching.prefetch_depth`.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
from keras import tree

from keras_strategy.data.local_rows import LocalRows

# Seconds that who ends waits for a batch that is being read.
_PATIENCE = 3.0
_END = object()

Scope = Callable[[], AbstractContextManager[Any]]


class _Here(threading.local):
    """What this thread reads ahead."""

    opened: "set[Prefetcher] | None" = None
    off = False


_here = _Here()


class Prefetcher(Iterator[Any]):
    """Gives the items of an iterator, of which some more are read meanwhile.

    The first one is read in the thread that asks for it, as what belongs to the
    beginning of an epoch is: drawing the order of its rows. What reading an item raises
    is raised where the item is asked for.

    Args:
        items: The iterator.
        depth: How many items are read ahead, 1 or more.
        pauses: After so many items, or any multiple, the next one is not read before
            it is asked for: an epoch ends there, or the items do.
        scope: What the thread reads in.
        sources: The `positions.Sources` of the items, to be told how far they were
            read for what was given; None for nothing.
    """

    def __init__(
        self,
        items: Iterator[Any],
        depth: int,
        pauses: Sequence[int] = (),
        scope: Scope = contextlib.nullcontext,
        sources: Any = None,
    ):
        self._items = items
        self._depth = depth
        self._pauses = pauses
        self._scope = scope
        self._ahead: deque[Future] = deque()
        self._sources = sources
        self._given = 0 if sources is None else sources.begun
        self._over = False
        self._pool: ThreadPoolExecutor | None = None

    def __next__(self) -> Any:
        """Returns the next item.

        Raises:
            StopIteration: If there is none.
        """
        if self._ahead:
            try:
                item, place = self._ahead[0].result()
            except Exception:
                self.stop()
                self._ahead.popleft()
                raise
            self._ahead.popleft()  # not where who asked was interrupted
        else:
            item, place = self._read_here()
        if self._sources is not None and place is not None:
            self._sources.given = place
        if item is _END:
            self._over = True
            self.stop()
            raise StopIteration
        self._given += 1
        self._read_on()
        return item

    def stop(self) -> None:
        """Ends the thread. What it has read is given to who goes on."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        if _here.opened is not None:
            _here.opened.discard(self)
        self._ahead = deque(future for future in self._ahead if not future.cancel())
        late = wait(self._ahead, _PATIENCE).not_done
        pool.shutdown(wait=not late)

    def _read_on(self) -> None:
        while len(self._ahead) < self._depth and not self._over and not _here.off:
            read = self._given + len(self._ahead)
            if any(read % pause == 0 for pause in self._pauses):
                break
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, "keras_strategy reads ahead")
                if _here.opened is not None:
                    _here.opened.add(self)
            self._ahead.append(self._pool.submit(self._read))
        if not self._ahead:
            self.stop()

    def _read(self) -> tuple[Any, Any]:
        try:
            with self._scope():
                item, place = self._read_here()
        except BaseException:
            self._over = True
            raise
        self._over = item is _END
        return item, place

    def _read_here(self) -> tuple[Any, Any]:
        if self._over:
            return _END, None
        item = next(self._items, _END)
        return item, None if self._sources is None else self._sources.here()


class PrefetchedBatches:
    """What can be read again and again, and is read ahead each time.

    Args:
        batches: What is read; it begins when `iter` is called, in that thread.
        depth: See `Prefetcher`, as the others. 0 for nothing.
        pauses: See `Prefetcher`.
        scope: See `Prefetcher`.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        depth: int,
        pauses: Sequence[int] = (),
        scope: Scope = contextlib.nullcontext,
    ):
        self._batches = batches
        self._arguments = depth, pauses, scope

    def __iter__(self) -> Iterator[Any]:
        """Starts to read."""
        return Prefetcher(iter(self._batches), *self._arguments)


@contextlib.contextmanager
def stop_prefetchers_on_exit() -> Iterator[None]:
    """No thread that reads ahead for what this surrounds is left when that ends."""
    opened: set[Prefetcher] = set()
    before, _here.opened = _here.opened, opened
    try:
        yield
    finally:
        for reading in list(opened):
            reading.stop()
        _here.opened = before


@contextlib.contextmanager
def prefetch_disabled() -> Iterator[None]:
    """Surrounds what reads a batch, and none after it."""
    before, _here.off = _here.off, True
    try:
        yield
    finally:
        _here.off = before


def copy_batch(batch: Any) -> Any:
    """A batch that stays what it is when its source fills the same arrays again."""
    return tree.map_structure(_copied, batch)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    if hasattr(leaf, "detach") and hasattr(leaf, "clone"):  # a tensor of torch
        return leaf.detach().clone()
    if isinstance(leaf, LocalRows):
        return replace(leaf, batch=copy_batch(leaf.batch))
    return leaf
