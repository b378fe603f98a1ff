"""Sources of grain's datasets and loaders."""

from collections.abc import Iterator
from typing import Any

from keras_strategy.data.sources.iterable import FitState, Shard, Source, is_kind


class GrainSource(Source):
    """A grain dataset or loader, whose iterator has `get_state()`."""

    def declared_shards(self) -> Iterator[Shard]:
        options = getattr(self.data, "_shard_options", None)
        if options is not None and options.shard_count > 1:
            yield [options.shard_count, options.shard_index]
        yield from _slices(self.data)

    def fit_state(self, each_batch: bool) -> FitState | None:
        is_map = is_kind(self.data, "grain", "MapDataset")  # has no iterator's state
        return None if is_map else FitState(self.data, each_batch)


def _slices(dataset: Any) -> Iterator[Shard]:
    if type(dataset).__name__ == "SliceMapDataset" and dataset._step > 1:
        yield [dataset._step, dataset._start]
    for source in getattr(dataset, "_parents", ()):
        yield from _slices(source)
