"""The source class of each kind of dataset."""

import sys
import types

import keras
import numpy as np
import pytest

import keras_strategy as ks
from keras_strategy.data.sources.kinds import find_source, source_of

ROWS = [np.float32(i) for i in range(4)]


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.float32([index])


def tf_data():
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.range(4).batch(2)


def loader():
    return pytest.importorskip("torch.utils.data").DataLoader(ROWS, 2)


def grain():
    return pytest.importorskip("grain").MapDataset.source(ROWS).batch(2)


KINDS = {
    "TfDataSource": tf_data,
    "PyDatasetSource": Batches,
    "IndexedSource": lambda: ks.IndexedDataset(ROWS, 2),
    "LoaderSource": loader,
    "GrainSource": grain,
    "OneShotSource": lambda: iter([np.ones(2), np.ones(2)]),
    "Source": lambda: [np.ones(2), np.ones(2)],
}


@pytest.mark.parametrize("kind", KINDS)
def test_source_of_each_kind(kind):
    source = source_of(KINDS[kind](), "Argument `dataset`")
    assert type(source).__name__ == kind
    assert source.count() == (None if kind == "OneShotSource" else 2)
    assert len(list(source.batches())) == 2


def test_find_source_accepts_user_module_of_same_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", types.ModuleType("datasets"))
    stream = types.SimpleNamespace(_distributed=types.SimpleNamespace())
    assert list(find_source(stream).declared_shards()) == []
