"""Sources of torch's `DataLoader`, of which each worker reads only its own rows.

That works with any Keras backend. torch is not imported for it, since a program that
has a loader has imported it.
"""

import copy
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

from keras import tree

from keras_strategy.cluster.membership import Cluster
from keras_strategy.core import context
from keras_strategy.core.step_state import Bounds, LocalRows, override
from keras_strategy.data.row_independence import StateWatch, is_declared_independent
from keras_strategy.data.sources.iterable import Shard, Source, as_array, is_kind
from keras_strategy.data.worker_batches import FULL_READS, make_local_rows, warn_once
from keras_strategy.errors import logger
from keras_strategy.options import AutoShardPolicy
from keras_strategy.training.row_weights import LocalBoundsFn, rows_to_read

# The rows of a global batch, the bounds of this worker's, and whether it reads all.
_Requested = tuple[list, Bounds, bool]
_DRAWN_LATER = (
    "A dataset drew random numbers for a row, and had drawn none for its first batch. "
    "Until now each worker has read only its own rows, so the numbers drawn differ "
    "from those on one device; from now on each worker reads all rows. Draw for row i "
    "from its own generator, such as `np.random.default_rng([seed, i])`."
)
_copies: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_warned_padding = False


class LoaderSource(Source):
    """A torch `DataLoader`."""

    def __init__(self, data: Any, reader: Any = None):
        super().__init__(data, reader)
        if is_kind(data.sampler, "torch.utils.data", "DistributedSampler"):
            self.policy = AutoShardPolicy.OFF

    def declared_shards(self) -> Iterator[Shard]:
        return Source(self.data.dataset).declared_shards()

    def shard(self, policy: AutoShardPolicy, cluster: Cluster) -> Source:
        if self.policy is AutoShardPolicy.OFF:
            _check_sampler(self.data.sampler, cluster)
        return super().shard(policy, cluster)

    def start_prefetch(self, depth: int) -> int:
        # A loader of rows has `num_workers`, and observes random draws.
        return depth if self._reader is self.data else 0

    def row_reader(self, local_bounds: LocalBoundsFn, *options: Any) -> Any:
        loader = loader_with_rows(self.data)
        has_rows = is_loader_with_rows(loader)
        return LoaderRowReader(loader, local_bounds) if has_rows else None


def _check_sampler(sampler: Any, cluster: Cluster) -> None:
    global _warned_padding
    if (sampler.num_replicas, sampler.rank) != (cluster.size, cluster.rank):
        raise ValueError(
            f"A DistributedSampler must be made for the {cluster.size} workers, here "
            f"with `num_replicas={cluster.size}, rank={cluster.rank}`; the replicas of "
            "a worker share what it reads. Received: a sampler with "
            f"num_replicas={sampler.num_replicas}, rank={sampler.rank}"
        )
    repeated = -len(sampler.dataset) % cluster.size
    if repeated and not sampler.drop_last and not _warned_padding:
        _warned_padding = True
        logger.warning(
            "A DistributedSampler pads %d rows for %d workers: %d of them train twice "
            "in each epoch, unlike on one device. Pass `fit` a DataLoader of global "
            "batches with `shuffle=True` instead: each worker reads only its own rows "
            "of it, and none is repeated.",
            len(sampler.dataset),
            cluster.size,
            repeated,
        )


def loader_with_rows(loader: Any) -> Any:
    """Return the copy of a `DataLoader` that can also read this worker's rows.

    Keras reads the copy too: a second loader would start processes of its own, and draw
    random numbers that one device does not draw. Any other data is returned as it is,
    and a loader that does not request rows by index, or whose rows may depend on each
    other.
    """
    torch_data = sys.modules.get("torch.utils.data")
    if (
        torch_data is None
        or type(loader) is not torch_data.DataLoader
        or is_loader_with_rows(loader)
    ):
        return loader
    if loader in _copies:
        return _copies[loader]
    dataset, collate = loader.dataset, loader.collate_fn
    is_default = collate is torch_data.default_collate
    source = dataset
    while type(source) is torch_data.Subset:  # whose `__getitems__` calls the source's
        source = source.dataset
    if (
        loader.batch_sampler is None
        or isinstance(dataset, torch_data.IterableDataset)
        or isinstance(loader.sampler, torch_data.DistributedSampler)
        or not getattr(loader, "in_order", True)
        or getattr(loader, "_iterator", None) is not None  # its processes have started
        or not (is_default or is_declared_independent(collate))
        or (hasattr(source, "__getitems__") and not is_declared_independent(dataset))
    ):
        return loader
    found = _copies[loader] = copy.copy(loader)
    sampler = _RowSampler(loader)
    vars(found).update(
        batch_sampler=sampler,
        collate_fn=sampler.collate,
        worker_init_fn=sampler.init_process,
    )
    return found


def is_loader_with_rows(loader: Any) -> bool:
    return isinstance(getattr(loader, "batch_sampler", None), _RowSampler)


class LoaderRowReader:
    """Reader of this worker's rows of a loader with rows.

    All workers draw the row order as the loader does, and read the complete first
    batch. If that leaves the dataset unchanged, they then read only their own rows.
    """

    def __init__(self, loader: Any, local_bounds: LocalBoundsFn):
        self._loader, self._local_bounds = loader, local_bounds
        self._sampler = loader.batch_sampler

    @property
    def can_read_ahead(self) -> bool:
        return not self._sampler.reads_all  # else reading may draw random numbers

    def __iter__(self) -> Iterator[LocalRows]:
        # In this order: starting draws random numbers, and may read ahead.
        with override(self._sampler, "local_bounds", self._local_bounds):
            batches = iter(self._loader)
        return self._read(batches, self._sampler.requested)

    def _read(
        self, batches: Iterator[Any], requested: deque[_Requested]
    ) -> Iterator[LocalRows]:
        sampler, dataset = self._sampler, self._loader.dataset
        for data in batches:
            rows, bounds, has_all = requested.popleft()
            has_changed = bool(sampler.changed)
            if has_changed:
                warn_once(context.get_strategy().extended.cluster, FULL_READS)
                if not sampler.reads_all:
                    logger.warning(_DRAWN_LATER)
            sampler.reads_all = has_changed
            yield make_local_rows(_arrays(data), rows, bounds, has_all, dataset)


class _RowSampler:
    """Batch sampler of a loader with rows: all of a batch, or those of this worker.

    Its `collate` watches the dataset, in this or a loader's process.
    """

    def __init__(self, loader: Any):
        self._batches, self._collate = loader.batch_sampler, loader.collate_fn
        self._dataset, self._init = loader.dataset, loader.worker_init_fn
        # True once reading has changed the dataset, in memory that processes share.
        self.changed = sys.modules["torch"].zeros(1, dtype=bool)
        self._has_processes = loader.num_workers > 0
        if self._has_processes:
            self.changed.share_memory_()
        self._watch: StateWatch | None = None
        # Set while a `LoaderRowReader` starts.
        self.local_bounds: LocalBoundsFn | None = None
        # True if this worker reads all rows of each batch.
        self.reads_all = True
        # The global batches whose rows have not arrived yet, in order.
        self.requested: deque[_Requested] = deque()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a loader's process needs."""
        return {**vars(self), "_batches": (), "local_bounds": None, "requested": None}

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list]:
        self.requested = deque()
        return self._sample(self.local_bounds, self.requested)

    def _sample(
        self, local_bounds: LocalBoundsFn | None, requested: deque[_Requested]
    ) -> Iterator[list]:
        for batch in self._batches:
            rows, first, end = list(batch), 0, None
            if local_bounds is not None:
                bounds = local_bounds(len(rows))
                requested.append((rows, bounds, self.reads_all))
                if not self.reads_all:
                    first, end = rows_to_read(bounds)
            if not self._has_processes:
                self._begin()
            yield rows[first:end]

    def init_process(self, worker_id: int) -> None:
        if self._init is not None:
            self._init(worker_id)
        self._begin()

    def _begin(self) -> None:
        if self._watch is None:
            self._watch = StateWatch(self._dataset)
        elif not self.changed:
            self._watch.begin()

    def collate(self, rows: Any) -> Any:
        batch = self._collate(rows)
        if self._watch is not None and not self.changed:
            self.changed |= self._watch.has_changed()
            if self._has_processes:
                self._begin()
        return batch


def _arrays(data: Any) -> Any:
    """Return a batch as arrays or tensors that Keras accepts."""
    data = tuple(data) if isinstance(data, list) else data

    def convert(leaf):
        return as_array(leaf, "the DataLoader") if hasattr(leaf, "shape") else leaf

    return tree.map_structure(convert, data)
