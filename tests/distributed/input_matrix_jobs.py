"""Every kind of data, in order or shuffled, whose rows draw random numbers or not."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

import keras_strategy as ks
from tests.distributed.jobs import in_charge

ROWS, BATCH, EPOCHS = 20, 8, 2


class Rows:
    """Rows that draw from a generator of the process or of their own, or count."""

    def __init__(self, draws: str):
        self.draws = draws
        self.rng = np.random.default_rng(5)
        self.calls = 0

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if not 0 <= index < ROWS:
            raise IndexError(index)
        noise = 0.0
        if self.draws == "process":
            noise = np.random.normal() + random.random()
        elif self.draws == "own":
            noise = self.rng.normal()
        elif self.draws == "counter":
            self.calls += 1
            noise = self.calls % 7 / 7
        x = np.float32([index / ROWS, noise, 1.0])
        return x, np.float32([np.sin(index)])


DRAWS = ("nothing", "process", "own", "counter")


def order(shuffle: bool) -> list[int]:
    rows = np.arange(ROWS)
    return (np.random.default_rng(3).permutation(rows) if shuffle else rows).tolist()


def batches(rows: Any, shuffle: bool) -> Iterator[tuple[np.ndarray, ...]]:
    indices = order(shuffle)
    for first in range(0, ROWS, BATCH):
        some = [rows[i] for i in indices[first : first + BATCH]]
        yield tuple(map(np.stack, zip(*some, strict=True)))


def center(rows: list) -> tuple:
    """Subtract a mean of the batch, as no collation by rows could."""
    import torch

    x, y = (torch.tensor(np.stack(part)) for part in zip(*rows, strict=True))
    return x - x.mean(0), y


def loader(**settings: Any) -> Callable[[Rows, bool], Any]:
    def make(rows: Rows, shuffle: bool) -> Any:
        from torch.utils.data import DataLoader

        if settings.get("batch_sampler"):
            indices = order(shuffle)
            lists = [indices[i : i + BATCH] for i in range(0, ROWS, BATCH)]
            return DataLoader(rows, **{**settings, "batch_sampler": lists})
        return DataLoader(rows, BATCH, shuffle=shuffle, **settings)

    return make


def stream(processes: int) -> Callable[[Rows, bool], Any]:
    def make(rows: Rows, shuffle: bool) -> Any:
        from torch.utils.data import DataLoader, IterableDataset

        class Stream(IterableDataset):
            def __iter__(self):
                return (rows[i] for i in order(shuffle))

        return DataLoader(Stream(), BATCH, num_workers=processes)

    return make


class Fetched(Rows):
    """Rows that torch reads together."""

    def __getitems__(self, indices: list[int]) -> list:
        rows = [self[i] for i in indices]
        return [(x + len(rows) / BATCH + rows[0][0], y) for x, y in rows]


class Batches(keras.utils.PyDataset):
    def __init__(self, rows: Rows, **settings: Any):
        super().__init__(**settings)
        self.rows = rows

    def __len__(self) -> int:
        return -(-ROWS // BATCH)

    def __getitem__(self, index: int) -> Any:
        indices = range(index * BATCH, min(ROWS, (index + 1) * BATCH))
        some = [self.rows[i] for i in indices]
        return tuple(map(np.stack, zip(*some, strict=True)))


def arrays(rows: Rows, shuffle: bool) -> Any:
    x, y = map(np.stack, zip(*[rows[i] for i in range(ROWS)], strict=True))
    return {"x": x, "y": y, "batch_size": BATCH}


def tf_data(rows: Rows, shuffle: bool) -> Any:
    import tensorflow as tf

    specs = tf.TensorSpec((3,), tf.float32), tf.TensorSpec((1,), tf.float32)
    dataset = tf.data.Dataset.from_generator(
        lambda: (rows[i] for i in range(ROWS)), output_signature=specs
    )
    dataset = dataset.shuffle(ROWS, seed=7) if shuffle else dataset
    # A map of a batch, which no split of rows may precede.
    return dataset.batch(BATCH).map(lambda x, y: (x - tf.reduce_mean(x, 0), y))


def grain(rows: Rows, shuffle: bool) -> Any:
    import grain

    dataset = grain.MapDataset.source(rows)
    dataset = dataset.shuffle(seed=4) if shuffle else dataset
    return dataset.batch(BATCH).to_iter_dataset(grain.ReadOptions(num_threads=0))


def indexed(**settings: Any) -> Callable[[Rows, bool], Any]:
    return lambda rows, shuffle: ks.IndexedDataset(rows, BATCH, shuffle, **settings)


class Centered(ks.IndexedDataset):
    """Batches of which a mean is subtracted."""

    def read(self, rows):
        x, y = super().read(rows)
        return x - x.mean(0), y


SOURCES: dict[str, Callable[[Rows, bool], Any]] = {
    "arrays": arrays,
    "loader": loader(),
    "loader of processes": loader(num_workers=2),
    "loader collate": loader(collate_fn=center),
    "loader collate of processes": loader(collate_fn=center, num_workers=2),
    "loader batch_sampler": loader(batch_sampler=True),
    "loader getitems": lambda rows, s: loader()(Fetched(rows.draws), s),
    "loader persistent": loader(num_workers=2, persistent_workers=True),
    "stream": stream(0),
    "stream of processes": stream(2),
    "PyDataset": lambda rows, shuffle: Batches(rows),
    "PyDataset of threads": lambda rows, shuffle: Batches(rows, workers=2),
    "generator": batches,
    "IndexedDataset": indexed(),
    "IndexedDataset read": lambda r, shuffle: Centered(r, BATCH, shuffle=shuffle),
    "tf.data": tf_data,
    "grain": grain,
}
# On one device too, threads draw in any order, or ahead of an end.
UNORDERED = "PyDataset of threads", "tf.data"


def cells(source: str) -> list[tuple[str, bool]]:
    draws = DRAWS[:1] if source in ("arrays", *UNORDERED) else DRAWS
    return [(kind, shuffle) for kind in draws for shuffle in (False, True)]


def fit_cells(source: str, alone: bool) -> dict[tuple[str, bool], Any]:
    """Return the weights after a `fit` of each cell, or the error's name."""
    results: dict[tuple[str, bool], Any] = {}
    strategy, _ = in_charge(alone)
    for draws, shuffle in cells(source):
        keras.utils.set_random_seed(17)
        if source.startswith(("loader", "stream")):
            import torch

            torch.manual_seed(17)
        _, scope = (None, strategy.scope()) if strategy else in_charge(True)
        with scope:
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.03), "mse")
        data = SOURCES[source](Rows(draws), shuffle)
        data = data if isinstance(data, dict) else {"x": data}
        epochs = 1 if source == "generator" else EPOCHS
        try:
            model.fit(**data, epochs=epochs, shuffle=shuffle, verbose=0)
            results[draws, shuffle] = [np.array(w) for w in model.get_weights()]
        except ks.errors.WorkerInputError as error:
            results[draws, shuffle] = f"{type(error).__name__}: {error}"
    return results
