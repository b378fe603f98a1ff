"""Lookup of the source class of a dataset."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from keras_strategy.data.distributed_dataset import DistributedDataset
from keras_strategy.data.sources.grain import GrainSource
from keras_strategy.data.sources.indexed import IndexedSource, PyDatasetSource
from keras_strategy.data.sources.iterable import OneShotSource, Source, is_kind, shorten
from keras_strategy.data.sources.tf_data import TfDataSource
from keras_strategy.data.sources.torch_loader import LoaderSource

# The classes of a source, where they are once a program has imported the library.
_KINDS: tuple[tuple[type[Source], str, tuple[str, ...]], ...] = (
    (TfDataSource, "tensorflow.python.data.ops.dataset_ops", ("DatasetV2",)),
    (IndexedSource, "keras_strategy.data.sources.indexed", ("IndexedDataset",)),
    (PyDatasetSource, "keras.utils", ("PyDataset",)),
    (LoaderSource, "torch.utils.data", ("DataLoader",)),
    (GrainSource, "grain", ("DataLoader", "MapDataset", "IterDataset")),
)


def find_source(data: Any) -> Source:
    """Return the source of a dataset, a plain one for any other value."""
    for kind, module, names in _KINDS:
        if is_kind(data, module, *names):
            return kind(data)
    return Source(data)


def source_of(dataset: Any, argument: str) -> Source:
    """Return the source of a dataset; raise an error if it is none."""
    if isinstance(dataset, DistributedDataset):
        raise ValueError(
            f"{argument} has been distributed already. Iterate over it as it is. "
            f"Received: {dataset!r}"
        )
    source = find_source(dataset)
    if type(source) is not Source:
        return source
    if isinstance(dataset, Iterator):
        return OneShotSource(dataset, argument)
    is_batch = isinstance(dataset, str | bytes | tuple | Mapping)
    is_batch = is_batch or hasattr(dataset, "shape")
    is_iterable = isinstance(dataset, Iterable) or hasattr(dataset, "__getitem__")
    if is_iterable and not is_batch:
        return source
    raise TypeError(
        f"{argument} must be a dataset of batches: a tf.data.Dataset, a torch "
        "DataLoader, a keras.utils.PyDataset, a list of batches, or another iterable "
        "that gives one batch (arrays, or a tuple or dict of them) at a time. "
        f"Received: {shorten(dataset)} of type {type(dataset).__name__}"
    )
