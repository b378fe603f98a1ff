"""A dataset whose rows change it, or that may hide that, is read whole."""

import collections
import itertools
import random
import sys
import threading

import numpy as np
import pytest

import keras_strategy as ks
from keras_strategy.data.row_independence import StateWatch

GLOBAL = np.random.default_rng(3)
calls = 0


class Rows:
    """Rows of a function of the dataset and an index."""

    rng = np.random.default_rng(5)

    def __init__(self, read):
        self.read = read
        self.counts = np.zeros((4, 3))
        self.seen = collections.deque()
        self.lock = threading.Lock()
        self.itself = self

    def __getitem__(self, index):
        return self.read(self, index)


def count_in_global(rows, index):
    global calls
    calls += 1


def draw_in_helper():
    return [GLOBAL.normal() for _ in range(1)]


def closure(draw):
    return lambda rows, index: draw()


CHANGES = {
    "generator of the class": lambda rows, index: rows.rng.normal(),
    "generator of the module": lambda rows, index: GLOBAL.normal(),
    "generator in a function": lambda rows, index: draw_in_helper(),
    "generator in a closure": closure(random.Random(3).random),
    "RandomState": closure(np.random.RandomState(3).normal),
    "NumPy": lambda rows, index: np.random.normal(),
    "Python": lambda rows, index: random.random(),
    "array": lambda rows, index: rows.counts.__setitem__(index, 1.0),
    "deque": lambda rows, index: rows.seen.append(index),
    "attribute": lambda rows, index: setattr(rows, "last", index),
    "global": count_in_global,
    "iterator": closure(itertools.cycle([1, 2]).__next__),
    "position": closure((i for i in range(9)).__next__),
}


@pytest.mark.parametrize("name", CHANGES)
def test_reading_that_changes_state_is_found(name):
    rows = Rows(CHANGES[name])
    watch = StateWatch(rows)
    rows[1]
    assert watch.has_changed()


@pytest.mark.parametrize("has_rest", [False, True])
def test_numpys_generators_are_watched_by_their_bits(has_rest):
    def changes(read):
        watch = StateWatch(Rows(lambda rows, index: 0.0))
        read()
        return watch.has_changed()

    np.random.seed(1)
    if has_rest:  # NumPy draws normal numbers in pairs, and keeps the second one
        np.random.normal()
    assert not changes(lambda: None)
    assert changes(np.random.normal)
    assert not changes(lambda: None)
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        assert not changes(lambda: None)
        assert changes(np.random.normal)
    finally:
        np.random.set_bit_generator(np.random.MT19937(1))


def test_torch_generator_is_found():
    torch = pytest.importorskip("torch")
    own = torch.Generator()
    for draw in (lambda: torch.rand(1), lambda: torch.rand(1, generator=own)):
        rows = Rows(closure(draw))
        watch = StateWatch(rows)
        rows[1]
        assert watch.has_changed()


def test_unchanged_state_is_proven():
    rows = Rows(lambda rows, index: np.random.default_rng(index).normal())
    watch = StateWatch(rows)
    rows[1]
    assert not watch.has_changed()
    nested = [(np.ones(3), {"words": ["a", i]}, np.float32) for i in range(5)]
    watch = StateWatch(nested)
    assert nested[1] is not None and not watch.has_changed()


class Unreadable(np.random.Generator):
    """A generator whose state cannot be copied."""

    def __reduce__(self):
        raise TypeError("It cannot be pickled.")


@pytest.mark.parametrize("kind", [np.random.Generator, Unreadable])
def test_generators_are_watched_after_the_first_batch(kind):
    rows = Rows(lambda rows, index: index and rows.rng.normal())
    rows.rng = kind(np.random.PCG64(1))
    watch = StateWatch(rows)
    rows[0]
    assert not watch.has_changed()
    watch.begin()
    rows[1]
    assert watch.has_changed()


def test_declared_rows_are_watched_for_process_wide_numbers_only():
    @ks.row_independent
    class Declared(Rows):
        pass

    rows = Declared(CHANGES["attribute"])
    watch = StateWatch(rows)
    rows[1]
    assert not watch.has_changed()
    watch.begin()
    assert not watch.has_changed()
    np.random.normal()
    assert watch.has_changed()


def test_rows_read_together_are_not_independent():
    data = pytest.importorskip("torch.utils.data")
    from keras_strategy.data.sources.torch_loader import loader_with_rows

    class Fetched(data.Dataset):
        def __len__(self):
            return 4

        def __getitems__(self, indices):
            return [len(indices) for _ in indices]

    rows = [np.float32([i]) for i in range(4)]
    subset = data.Subset(rows, [0, 2])
    for dataset, collate, can_split in [
        (rows, None, True),
        (subset, None, True),
        (rows, lambda items: items, False),
        (rows, ks.row_independent(lambda items: items), True),
        (Fetched(), None, False),
        (data.Subset(Fetched(), [0, 2]), None, False),
        (ks.row_independent(Fetched()), None, True),
    ]:
        loader = data.DataLoader(dataset, 2, collate_fn=collate)
        assert (loader_with_rows(loader) is not loader) == can_split
        assert len(loader_with_rows(loader)) == len(loader)


def test_copy_of_loader_yields_the_same_batches():
    torch = pytest.importorskip("torch")
    assert "torch" in sys.modules
    from keras_strategy.data.sources.torch_loader import loader_with_rows

    def read(wrap):
        torch.manual_seed(3)
        data = torch.utils.data.TensorDataset(torch.arange(10))
        loader = wrap(torch.utils.data.DataLoader(data, 4, shuffle=True))
        return [batch[0].tolist() for _ in range(2) for batch in loader]

    assert read(loader_with_rows) == read(lambda loader: loader)
