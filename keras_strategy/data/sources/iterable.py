"""Sources: what this package does with a dataset, for each kind of dataset.

`Source` reads any iterable of batches. The other modules of this folder override what
differs for one library; `kinds.source_of` finds the class, and nothing else asks what
kind a dataset is. The classes of libraries are looked up in `sys.modules`: importing a
library only to ask would cost seconds and memory.

A source that can report its position does so itself: by `state_dict` and
`load_state_dict` (torchdata, Hugging Face), or by `get_state` and `set_state` (grain's
iterators). A `PyDataset` is restored by batch index. Any other source is read again
from its beginning up to its position.
"""

import collections
import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_strategy.cluster.membership import Cluster
from keras_strategy.core.registry import get_engine
from keras_strategy.data.prefetch import Prefetcher, copy_batch
from keras_strategy.errors import logger
from keras_strategy.options import AutoShardPolicy
from keras_strategy.training.resume import decode, encode
from keras_strategy.training.row_weights import LocalBoundsFn

# The number of shards, and the index of the one that a dataset gives.
Shard = list[int]
_STATE_PROTOCOLS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))


class Source:
    """A dataset of batches, and the position of the iteration that reads it."""

    # True if the batches can be read only once.
    once = False
    # True if all elements are declared to have the same shapes.
    has_fixed_shapes = False
    # The dataset if it is a `tf.data.Dataset`, which Keras and tf.distribute can read.
    tf_dataset: Any = None
    # True if a pass has one state in `fit`, as batches have indices.
    has_indices = False
    # What the dataset declares about workers.
    policy = AutoShardPolicy.AUTO

    def __init__(self, data: Any, reader: Any = None):
        self.data = data
        # The dataset, or a reader of this worker's rows of it.
        self._reader = data if reader is None else reader
        # The dataset or its iterator, whichever reports its own position.
        self._stateful = data if _state_methods(data) else None
        self._passes: list[_Pass] = []
        # The position at which the next iteration starts; None for the beginning.
        self.restore_from: dict[str, Any] | None = None
        # The index of the first batch of the latest iteration.
        self.first_batch = 0

    def batches(self, first: int = 0) -> Iterator[Any]:
        """Start to read; at batch `first` only if batches have indices."""
        return iter(self._reader)

    def in_order(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return batches of the dataset that read it in one epoch's order."""
        return batches

    def count(self) -> int | None:
        """Return the number of batches, None if it is unknown or infinite."""
        try:
            return len(self.data)
        except (TypeError, NotImplementedError):
            return None

    def start_prefetch(self, depth: int) -> int:
        """Return how many of the batches to prefetch, given what options request."""
        return depth

    def declared_shards(self) -> Iterator[Shard]:
        """Yield the shards that the dataset declares, the last applied first."""
        split = getattr(self.data, "_distributed", None)
        if split is not None and is_kind(self.data, "datasets", "IterableDataset"):
            yield [split.world_size, split.rank]  # of Hugging Face's `split_by_node`

    def per_worker_policy(
        self, policy: AutoShardPolicy, cluster: Cluster
    ) -> AutoShardPolicy | None:
        """Return the policy that options request, or that the dataset declares."""
        # None for a policy by which the workers share global batches.
        if policy is AutoShardPolicy.AUTO:
            policy = self.policy
        if policy is AutoShardPolicy.AUTO and self._is_presharded(cluster):
            return AutoShardPolicy.OFF
        # Else a global batch is the concatenation of all workers' batches.
        is_shared = policy in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA)
        return None if is_shared else policy

    def _is_presharded(self, cluster: Cluster) -> bool:
        """Return True if every worker's dataset declares that it is a shard."""
        shards = list(self.declared_shards())
        if not shards:
            return False
        by_worker = cluster.exchange("the shards that a dataset gives", shards)
        if all(other == shards for other in by_worker):
            return False  # all read the same
        expected = tuple([cluster.size, rank] for rank in range(cluster.size))
        if expected in zip(*by_worker, strict=False):
            return True
        raise ValueError(
            f"The dataset of worker r must give shard r of {cluster.size}, or that of "
            "all workers the same rows. Received datasets of these shards (number of "
            f"shards, index): {cluster.format_by_worker(by_worker)}."
        )

    def shard(self, policy: AutoShardPolicy, cluster: Cluster) -> "Source":
        """Return this worker's shard under a policy of data for each worker."""
        if policy is AutoShardPolicy.OFF:
            return self
        raise ValueError(
            f"AutoShardPolicy.{policy.name} is for a `tf.data.Dataset`, whose files "
            "are known. Have each worker read `keras_strategy.files(pattern)`, and use "
            f"AutoShardPolicy.OFF. Received: dataset of type {type(self.data).__name__}"
        )

    def row_reader(self, local_bounds: LocalBoundsFn, *options: Any) -> Any:
        """Return a reader of this worker's rows; None if all rows must be read."""
        return None

    def local_rows(self, local_bounds: LocalBoundsFn) -> "Source | None":
        """Return a source of this worker's rows, or None."""
        reader = self.row_reader(local_bounds)
        return None if reader is None else type(self)(self.data, reader)

    def fit_state(self, each_batch: bool) -> "FitState | None":
        """Return the state of a `fit` of the dataset; None if it has none."""
        if not has_state_dict(self.data):
            return None
        return FitState(self.data, each_batch, self.has_indices)

    def start(self) -> Iterator[Any]:
        """Start an iteration, from a restored position if there is one."""
        position, self.restore_from = self.restore_from, None
        if position is None:
            self.first_batch, iterator = 0, self.batches()
        else:
            iterator = self._resume(position)
        if self._stateful is not self.data:
            self._stateful = iterator if _state_methods(iterator) else None
        self._passes.append(_Pass(self.first_batch))
        return self._passes[-1].count(iterator)

    def position(self) -> dict[str, Any]:
        """Return JSON values, apart from the dataset's own state."""
        if self.restore_from is not None:
            return self.restore_from
        *before, now = self._passes or [_Pass(0)]
        passes: list[int | None] = []
        state = None
        if self._stateful is None:
            # The number of batches read in each pass, None for a complete one.
            past = [*before, now] if now.ended else before
            passes = [None if each.ended else each.batches for each in past]
        elif self._stateful is self.data or not now.ended:
            state = _state_methods(self._stateful)[0]()
        batch = 0 if now.ended else now.batches
        return {"batch": batch, "passes": passes, "state": state}

    def _resume(self, position: dict[str, Any]) -> Iterator[Any]:
        self.first_batch, passes = position["batch"], position["passes"]
        self._passes = [_Pass(n or 0, ended=n is None) for n in passes]
        state = position["state"]
        if state is None:
            return self._reread(passes)
        methods = _state_methods(self.data)
        if methods:
            methods[1](state)
            return self.batches(self.first_batch)
        iterator = self.batches()
        if not _state_methods(iterator):
            raise ValueError(
                "The state belongs to a dataset that reports its own position, and "
                "this one does not. Received: a dataset of type "
                f"{type(self.data).__name__}"
            )
        _state_methods(iterator)[1](state)
        return iterator

    def _reread(self, passes: list[int | None]) -> Iterator[Any]:
        """Read again what was read before the position to resume at."""
        if passes or self.first_batch:
            logger.info(
                "A dataset of type %s resumes at batch %d of pass %d. It does not "
                "report its position (`state_dict`), so it is read again up to there.",
                type(self.data).__name__,
                self.first_batch,
                len(passes),
            )
        for count in passes:
            # Nothing refers to this iterator when the next one starts.
            collections.deque(itertools.islice(self.batches(), count), maxlen=0)
        iterator = self.batches()
        collections.deque(itertools.islice(iterator, self.first_batch), maxlen=0)
        return iterator


class OneShotSource(Source):
    """An iterator or generator, which can be read only once."""

    once = True

    def __init__(self, data: Iterator[Any], argument: str):
        super().__init__(data)
        self._argument = argument
        self._ended = False

    def start_prefetch(self, depth: int) -> int:
        """Read ahead, for all iterations, unless the source reports its position."""
        if depth and not _state_methods(self.data):
            self._reader = Prefetcher(map(copy_batch, self.data), depth)
        return 0

    def batches(self, first: int = 0) -> Iterator[Any]:
        if self._ended:
            raise RuntimeError(
                f"{self._argument} was an iterator or a generator, which gives its "
                "batches once, and they have been read. Distribute a dataset that can "
                "be read again (a list, or an object whose `__iter__` starts anew), "
                f"or a new generator for each epoch. Received: {self.data!r}"
            )
        return self._read()

    def _read(self) -> Iterator[Any]:
        # Not `yield from`, which closes the generator together with its reader.
        for batch in self._reader:  # noqa: UP028
            yield batch
        self._ended = True


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


def _state_methods(source: Any) -> Any:
    """Return the methods that get and set a source's state, or None."""
    for names in _STATE_PROTOCOLS:
        methods = [getattr(source, name, None) for name in names]
        if all(map(callable, methods)):
            return methods
    return None


def is_kind(data: Any, module: str, *names: str) -> bool:
    """Return True for an instance of a library's classes, if it has been imported."""
    library = sys.modules.get(module)
    if library is None:
        return False
    # The user's module may have the same name, and no such class.
    return isinstance(data, tuple(getattr(library, name, ()) for name in names))


def has_state_dict(thing: Any) -> bool:
    """Return True for objects with `state_dict()` and `load_state_dict(state)`."""
    return all(callable(getattr(thing, name, None)) for name in _STATE_PROTOCOLS[0])


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
        f"{shorten(leaf)} of type {type(leaf).__name__}"
    )


def shorten(value: Any) -> str:
    """Return the representation of a value in at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# --- `fit`

# Upper bound on batches that are read ahead.
_MAX_PREFETCHED = 256


class FitState:
    """State of the data of one `fit`; within an epoch, too, if `each_batch` is True.

    Keras and the backends may read ahead, so the state is recorded after each batch and
    kept until the step count is known.
    """

    def __init__(self, data: Any, each_batch: bool, has_indices: bool = False):
        self._data, self._has_indices = data, has_indices
        self._each_batch = each_batch
        self._has_state_dict = has_state_dict(data)
        self._start_state: Any = None
        self._states: collections.deque[tuple[int, Any]] = collections.deque(
            maxlen=_MAX_PREFETCHED
        )
        self._pending: tuple[int, Any] | None = None

    def start_pass(self, continues: bool) -> None:
        """Record that the loop starts to read; `continues` if it continues a pass."""
        if self._has_state_dict:
            self._start_state = encode(self._data.state_dict())

    def state_at(self, read: int, continues: bool) -> list[Any] | None:
        """Return `[number, state]` for `restore` after `read` batches, or None."""
        if self._has_indices or (self._has_state_dict and not read):
            return [0, self._start_state if read else encode(self._data.state_dict())]
        states = dict(self._states)
        return [read, states[read]] if read in states else None

    def restore(self, saved: list[Any] | None) -> int:
        """Restore a state; return the number of batches that need not be read again."""
        if saved is None:
            return 0
        number, state = saved
        if self._has_indices or not number:
            self._data.load_state_dict(decode(state))
            self._start_state = state
        else:
            self._pending = number, state
        return number

    def warn_other_reads(self) -> None:
        """Warn if resuming with another backend may read other data."""

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Context manager in which reading the data records its state."""
        if self._has_indices:
            return contextlib.nullcontext()
        return replaced_iter(self._data, self._iterate)

    def _iterate(self, data: Any, cls: Any) -> Any:
        self._states.clear()
        pending, self._pending = self._pending, None
        number, state = pending or (0, None)
        if pending is not None and self._has_state_dict:
            data.load_state_dict(decode(state))
        iterator = cls.__iter__(data)
        if not self._has_state_dict:
            if not hasattr(iterator, "get_state"):
                return iterator
            if pending is not None:
                iterator.set_state(decode(state))
        if not self._each_batch:
            return iterator
        numbers = itertools.count(number + 1)

        def record(batch, get_state):
            self._states.append((next(numbers), encode(get_state())))
            return batch

        if self._has_state_dict:
            return (record(batch, data.state_dict) for batch in iterator)
        # Grain wraps the iterator and uses more than `__next__`.
        iterator_class = type(iterator)

        def read_next(iterator):
            return record(iterator_class.__next__(iterator), iterator.get_state)

        iterator.__class__ = _derived(iterator_class, {"__next__": read_next})
        return iterator


@contextlib.contextmanager
def replaced_iter(data: Any, iterate: Callable[[Any, type], Any]) -> Iterator[None]:
    """Context manager in which `iterate(data, cls)` iterates over an object."""
    cls = type(data)
    derived = _derived(cls, {"__iter__": lambda data: iterate(data, cls)})
    object.__setattr__(data, "__class__", derived)
    try:
        yield
    finally:
        object.__setattr__(data, "__class__", cls)


def _derived(cls: type, members: dict[str, Any]) -> type:
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, **members})
