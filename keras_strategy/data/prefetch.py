"""Batches that a thread reads while a step computes, and the positions of sources.

Only the source can notice that its next batch is read early, if its batches depend on
what training does meanwhile: on process-wide random numbers, or on what a callback
sets. So without an option, only sources that promise not to are prefetched: see
`Source.start_prefetch`. Prefetched batches do not count as read.
"""

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
from keras import tree

from keras_strategy.core.step_state import LocalRows, override

# Seconds that `Prefetcher.stop` waits for a batch that is being read.
_STOP_SECONDS = 3.0
_END = object()

Scope = Callable[[], AbstractContextManager[Any]]


class SourceStates:
    """Sources with positions; `turns` batches of each make up a dataset's element."""

    def __init__(self, sources: Sequence[Any], turns: int = 1):
        self._sources, self._turns = sources, turns
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

    can_read_ahead = True  # for workers that exchange the next batch while they compute

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
