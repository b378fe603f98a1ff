"""Batches that a thread reads before they are requested.

While a step computes, the next batch is read. Only the source can notice, if its
batches depend on what training does meanwhile: on process-wide random numbers, or on
what a callback sets. So without an option, only sources that promise not to are
prefetched: see `splitting.prefetch_depth`.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from keras import tree

from keras_strategy.data.local_rows import LocalRows

# Seconds that `Prefetcher.stop` waits for a batch that is being read.
_STOP_SECONDS = 3.0
_END = object()

Scope = Callable[[], AbstractContextManager[Any]]


class _ThreadState(threading.local):
    active: "set[Prefetcher] | None" = None
    disabled = False


_thread = _ThreadState()


class Prefetcher(Iterator[Any]):
    """Iterator that reads some items of another iterator ahead, in a thread.

    The first item is read in the requesting thread, and with it what begins an epoch,
    such as drawing its row order. After any multiple of one of the epoch lengths
    `pauses`, the next item is read only when it is requested. The `SourceStates` of the
    items learn the position of each item returned.
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
    """Context manager that stops all prefetch threads started in it."""
    active: set[Prefetcher] = set()
    outer, _thread.active = _thread.active, active
    try:
        yield
    finally:
        for prefetcher in list(active):
            prefetcher.stop()
        _thread.active = outer


@contextlib.contextmanager
def prefetch_disabled() -> Iterator[None]:
    """Context manager in which reading a batch starts no further reads."""
    outer, _thread.disabled = _thread.disabled, True
    try:
        yield
    finally:
        _thread.disabled = outer


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
