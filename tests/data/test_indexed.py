"""Batches of sources that can be indexed, and shares of files."""

import random

import keras
import numpy as np
import pytest

import keras_strategy as ks
from keras_strategy.data.sources.indexed import IndexedRowReader

X = np.arange(10, dtype="float32").reshape(5, 2)


class Doubles:
    """Rows as grain's data sources have them."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return {"x": X[index] * 2, "y": index}


def test_batches_are_read_by_index():
    dataset = ks.IndexedDataset(Doubles(), batch_size=2, threads=2)
    assert len(dataset) == 3
    np.testing.assert_array_equal(dataset[2]["x"], X[4:] * 2)
    np.testing.assert_array_equal(dataset[0]["y"], [0, 1])
    assert len(ks.IndexedDataset(X, batch_size=2, drop_remainder=True)) == 2


def test_each_epoch_is_shuffled_differently():
    dataset = ks.IndexedDataset(list(range(50)), batch_size=50, shuffle=True)
    first = dataset[0]
    np.testing.assert_array_equal(dataset[0], first)
    dataset.on_epoch_end()
    second = dataset[0]
    assert sorted(first) == sorted(second) == list(range(50))
    assert list(first) != list(second)
    again = ks.IndexedDataset(list(range(50)), batch_size=50, shuffle=True)
    again.load_state_dict(dataset.state_dict())
    np.testing.assert_array_equal(again[0], second)


@pytest.mark.parametrize("shuffle", [None, random.shuffle])
def test_local_rows_keep_the_order_of_their_epoch(shuffle):
    """Also of batches read after an epoch's end: see `iterate_in_epoch_order`."""
    dataset = ks.IndexedDataset(list(range(50)), batch_size=10, shuffle=True)
    passes = iter(IndexedRowReader(dataset, lambda rows: [(0, rows)], shuffle))
    read = [next(passes).batch]
    dataset.on_epoch_end()
    read += [own.batch for own in passes]
    assert sorted(np.concatenate(read)) == list(range(50))


@pytest.mark.parametrize("prefetch", [0, 1])
def test_concurrent_loops_keep_their_order(prefetch):
    """One of them ends an epoch of the dataset while the other is in its middle."""
    rows = list(np.arange(40, dtype="float32"))
    dataset = ks.IndexedDataset(rows, batch_size=8, shuffle=True, prefetch=prefetch)
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    distributed = strategy.experimental_distribute_dataset(dataset)

    def rows_of(batch):
        return np.concatenate(strategy.experimental_local_results(batch))

    outer, inner = iter(distributed), list(distributed)
    passes = [[rows_of(next(outer))], list(map(rows_of, inner))]
    passes.append([rows_of(batch) for batch in distributed])
    passes[0] += map(rows_of, outer)
    for read in passes:
        assert sorted(np.concatenate(read)) == rows


def test_grain_dataset():
    grain = pytest.importorskip("grain")
    source = grain.MapDataset.source(X).map(lambda row: row + 1)
    np.testing.assert_array_equal(ks.IndexedDataset(source, 5)[0], X + 1)


def test_keras_reads_indexed_dataset_without_strategy():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    dataset = ks.IndexedDataset(list(X), batch_size=2)
    expected = model.predict(X, verbose=0)
    np.testing.assert_allclose(model.predict(dataset, verbose=0), expected, atol=1e-5)


def test_bad_arguments_are_refused():
    with pytest.raises(TypeError, match="`source` must have"):
        ks.IndexedDataset(iter(X), batch_size=2)
    with pytest.raises(ValueError, match="`batch_size` must be 1 or more"):
        ks.IndexedDataset(X, batch_size=0)


def test_rows_of_files(tmp_path):
    for name in "cab":
        (tmp_path / name).touch()
    names = [str(tmp_path / name) for name in "abc"]
    assert ks.files(f"{tmp_path}/*") == names
    shares = [ks.files(f"{tmp_path}/*", ks.InputContext(2, i)) for i in range(2)]
    assert shares == [names[::2], names[1::2]]
    with pytest.raises(ValueError, match="at least one file to read"):
        ks.files(f"{tmp_path}/*", ks.InputContext(4, 0))
