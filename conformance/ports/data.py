"""Packages that read data, and leave out what other processes read."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np

import keras_strategy as ks
from conformance.compare import scope
from conformance.ports.port import Outcome, compiled, dense, folder, port, vectors

ROWS, BATCH = 27, 12  # of one device, and of all workers together
X, Y = vectors(ROWS, 4, 1)
DATASETS = "huggingface/datasets: docs/source/use_with_pytorch.mdx"


def which(strategy: Any) -> tuple[int, int]:
    """Return the rank of a process, and the number of processes."""
    if strategy is None:
        return 0, 1
    return strategy.extended.cluster.rank, strategy.extended.cluster.size


def trained(strategy: Any, data: Any, epochs: int = 2) -> Outcome:
    """Trains on data, which no worker may read twice without a word."""
    keras.utils.set_random_seed(1)
    with scope(strategy):
        sgd = keras.optimizers.SGD(0.1)
        model = compiled(dense(4, 1), sgd, "mse", metrics=["mae"])
    history = model.fit(data, epochs=epochs, verbose=0, shuffle=False).history
    return Outcome(model.get_weights(), list(history.values()))


def table() -> Any:
    import datasets

    return datasets.Dataset.from_dict({"x": X, "y": Y}).with_format("numpy")


def collate(rows: list) -> tuple:
    """Return a batch of rows that have names."""
    import torch

    return tuple(torch.tensor(np.stack([row[name] for row in rows])) for name in "xy")


@port(DATASETS, needs="datasets", workers=True)
def hugging_face_stream(strategy):
    """`split_dataset_by_node` says which part it gives, behind a `DataLoader` too."""
    from datasets.distributed import split_dataset_by_node
    from torch.utils.data import DataLoader

    rank, size = which(strategy)
    stream = split_dataset_by_node(table().to_iterable_dataset(), rank, size)
    loader = DataLoader(stream, batch_size=BATCH // size, collate_fn=collate)
    return trained(strategy, loader)


@port(DATASETS, needs="datasets", workers=True)
def hugging_face_rows(strategy):
    """Read a map-style dataset, which needs no split."""
    from torch.utils.data import DataLoader

    return trained(strategy, DataLoader(table(), BATCH, collate_fn=collate))


REFUSED = dict.fromkeys(("jax", "torch", "tensorflow"), "AutoShardPolicy.OFF")


@port(DATASETS, needs="datasets", workers=True, refused=REFUSED)
def hugging_face_rows_split(strategy):
    """And does not say that it was split, which is found in the first batch."""
    from datasets.distributed import split_dataset_by_node
    from torch.utils.data import DataLoader

    part = split_dataset_by_node(table(), *which(strategy))
    return trained(strategy, DataLoader(part, 4, collate_fn=collate))


@contextlib.contextmanager
def ranks(strategy: Any) -> Iterator[None]:
    """Tells the process's number as `torchrun` does."""
    names = dict(zip(("RANK", "WORLD_SIZE"), map(str, which(strategy)), strict=True))
    with mock.patch.dict(os.environ, names):
        yield


@port("webdataset/webdataset: README.md", needs="webdataset", workers=True)
def webdataset_shards(strategy):
    """Files by `split_by_node`; an epoch is one batch, whichever files are read."""
    import webdataset as wds

    with folder() as path, ranks(strategy):
        for number in range(6):
            with wds.TarWriter(str(path / f"{number}.tar")) as file:
                for i in range(number, ROWS, 6):
                    row = {"x.npy": X[i], "y.npy": Y[i]}
                    file.write({"__key__": f"{i:03}", **row})
        files = sorted(map(str, path.glob("*.tar")))
        data = wds.WebDataset(
            files, nodesplitter=wds.split_by_node, shardshuffle=False
        ).decode()
        data = data.to_tuple("x.npy", "y.npy").batched(ROWS)
        if strategy is None:
            data = ks.IndexedDataset([*zip(X, Y, strict=True)], ROWS)
        else:
            off = ks.InputOptions(auto_shard_policy="OFF")
            data = strategy.experimental_distribute_dataset(data, off)
        return trained(strategy, data, epochs=4)


TORCHDATA = "meta-pytorch/data: torchdata/stateful_dataloader/README.md"


def loader(rank: int, size: int) -> Any:
    import torch
    from torch.utils.data import DistributedSampler, TensorDataset
    from torchdata.stateful_dataloader import StatefulDataLoader

    # As many rows as its padding needs none for.
    rows = TensorDataset(torch.tensor(X[:24]), torch.tensor(Y[:24]))
    sampler = DistributedSampler(rows, size, rank, shuffle=False)
    return StatefulDataLoader(rows, batch_size=BATCH // size, sampler=sampler)


@port(TORCHDATA, needs="torchdata", workers=True)
def torchdata_sampler(strategy):
    return trained(strategy, loader(*which(strategy)))


@port(TORCHDATA, needs="torchdata", workers=True)
def torchdata_goes_on(strategy):
    """Resume a loader that reports its position, under a strategy too."""

    def distributed():
        from torchdata.stateful_dataloader import StatefulDataLoader

        data: Any = StatefulDataLoader([*X], batch_size=8)
        if strategy is None:
            return data
        return strategy.experimental_distribute_dataset(data)

    def rows(x):
        x = x if strategy is None else strategy.gather(x, axis=0)
        return keras.ops.convert_to_numpy(x)

    begun, again = distributed(), distributed()
    batches = iter(begun)
    first = rows(next(batches))
    again.load_state_dict(begun.state_dict())
    rest = [rows(x) for x in again]
    assert len(rest) == 3
    return Outcome([first, *rest], [0.0])
