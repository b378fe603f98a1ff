"""Datasets that say where they are, and go on there in another process."""

import json

import keras
import numpy as np
import pytest

import keras_strategy as ks

TENSORFLOW = keras.backend.backend() == "tensorflow"
ROWS = 10
AHEAD = ks.InputOptions(experimental_per_replica_buffer_size=2)


class Shuffled:
    """Read from its beginning each time, in another order of its own generator."""

    def __init__(self):
        self.rng = np.random.default_rng(3)
        self.read = 0

    def __iter__(self):
        order = self.rng.permutation(ROWS)
        for begin in range(0, ROWS, 2):
            self.read += 1
            yield order[begin : begin + 2]


class SaysWhere(Shuffled):
    """As those of torchdata: the state is of the epoch that is being read."""

    def __init__(self):
        super().__init__()
        self.begun, self.batch, self.first = self.rng.bit_generator.state, 0, 0

    def state_dict(self):
        return {"begun": self.begun, "batch": self.batch}

    def load_state_dict(self, state):
        self.rng.bit_generator.state = state["begun"]
        self.first = state["batch"]

    def __iter__(self):
        self.begun = self.rng.bit_generator.state
        order = self.rng.permutation(ROWS)
        first, self.first = self.first, 0
        for self.batch in range(first + 1, ROWS // 2 + 1):
            self.read += 1
            yield order[2 * self.batch - 2 : 2 * self.batch]
        self.begun, self.batch = self.rng.bit_generator.state, 0


class Numbered(keras.utils.PyDataset):
    """Batches known by their numbers, in the order of the epoch."""

    def __init__(self):
        super().__init__()
        self.epoch = self.read = 0

    def __len__(self):
        return ROWS // 2

    def __getitem__(self, index):
        self.read += 1
        order = np.random.default_rng(self.epoch).permutation(ROWS)
        return order[2 * index : 2 * index + 2]

    def on_epoch_end(self):
        self.epoch += 1


class Rows:
    """A source that counts what is read of it."""

    def __init__(self):
        self.read = 0

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        self.read += 1
        return np.int64(row)


def indexed():
    source = Rows()
    dataset = ks.IndexedDataset(source, 2, shuffle=True, seed=4, prefetch=2)
    return source, dataset


def loader():
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.arange(ROWS))
    generator = torch.Generator().manual_seed(5)
    dataset = torch.utils.data.DataLoader(
        data, batch_size=2, shuffle=True, generator=generator
    )
    return None, dataset


def grain():
    found = pytest.importorskip("grain")
    source = found.MapDataset.range(ROWS).shuffle(seed=6)
    return None, source.to_iter_dataset().batch(2)


def generator():
    return None, iter([np.arange(2 * i, 2 * i + 2) for i in range(3 * ROWS // 2)])


def counting(cls):
    source = cls()
    return source, source


# What makes the source, and how many batches are read again when it goes on with the
# third batch of the second epoch; None where that is not counted.
SOURCES = {
    "shuffled": (lambda: counting(Shuffled), 7),
    "says where it is": (lambda: counting(SaysWhere), 0),
    "PyDataset": (lambda: counting(Numbered), 0),
    "IndexedDataset": (indexed, 0),
    "DataLoader": (loader, None),
    "grain": (grain, None),
}


def rows(strategy, element):
    element = element[0] if isinstance(element, tuple | list) else element
    local = strategy.experimental_local_results(element)
    parts = [keras.ops.convert_to_numpy(part) for part in local]
    return np.concatenate(parts).tolist()


def through_json(state):
    """As a checkpoint keeps it; what grain and NumPy say of themselves is JSON, too."""
    return json.loads(json.dumps(state))


@pytest.mark.full(keep_on="torch")
@pytest.mark.parametrize("options", [None, AHEAD], ids=["", "ahead"])
@pytest.mark.parametrize("kind", SOURCES)
def test_loop_resumes_at_its_batch(kind, options, two):
    make, read_again = SOURCES[kind]

    def distributed():
        source, dataset = make()
        return source, two.experimental_distribute_dataset(dataset, options)

    _, whole = distributed()
    expected = [[rows(two, x) for x in whole] for _ in range(3)]
    _, first = distributed()
    states = [first.state_dict()]
    for _ in range(2):
        for _ in first:
            states.append(first.state_dict())
        states.append(first.state_dict())
    # At the beginning; within the first epoch; when all of it was given; at its end;
    # within the second one, and at its end.
    flat = [[], *expected]
    for at, epoch, batch in [(0, 1, 0), (2, 1, 2), (5, 1, 5), (6, 2, 0), (8, 2, 2)]:
        source, again = distributed()
        again.load_state_dict(through_json(states[at]))
        assert through_json(again.state_dict()) == through_json(states[at])
        got = []
        for x in again:
            if not got and source is not None and (epoch, batch) == (2, 2):
                ahead = 2 if options or kind == "IndexedDataset" else 0
                each = 2 if kind == "IndexedDataset" else 1
                assert source.read <= read_again + each * (1 + ahead)
            got.append(rows(two, x))
        assert got == flat[epoch][batch:]
        if epoch < 3:
            assert [rows(two, x) for x in again] == flat[epoch + 1]


@pytest.mark.parametrize("options", [None, AHEAD], ids=["", "ahead"])
def test_generator_is_skipped_to_its_batch(options, two):
    _, batches = generator()
    dataset = two.experimental_distribute_dataset(batches, options)
    seen = [rows(two, x) for _, x in zip(range(3), dataset, strict=False)]
    state = dataset.state_dict()
    again = two.experimental_distribute_dataset(generator()[1], options)
    again.load_state_dict(through_json(state))
    assert rows(two, next(iter(again))) == [6, 7] != seen[-1]
    assert rows(two, next(iter(again))) == [8, 9]


@pytest.mark.parametrize("options", [None, AHEAD], ids=["", "ahead"])
def test_per_replica_batches_resume(options, two):
    def distributed():
        return two.distribute_datasets_from_function(lambda _: Numbered(), options)

    expected = [rows(two, x) for x in distributed()]
    dataset = distributed()
    for _ in dataset:
        break
    again = distributed()
    again.load_state_dict(through_json(dataset.state_dict()))
    assert [rows(two, x) for x in again] == expected[1:]


@pytest.mark.parametrize("options", [None, AHEAD], ids=["", "ahead"])
def test_prefetched_batches_do_not_count(options, two):
    """An element that was read for its shape, as what was read ahead."""
    dataset = two.experimental_distribute_dataset(Shuffled(), options)
    start = dataset.state_dict()
    assert dataset.element_spec.values[0].shape == (None,)
    assert dataset.state_dict() == start
    next(iter(dataset))
    assert dataset.state_dict() != start


def test_bad_states_are_refused(two):
    dataset = two.experimental_distribute_dataset(Shuffled())
    for state in (None, {}, {"sources": []}):
        with pytest.raises(ValueError, match="`state` must be what `state_dict`"):
            dataset.load_state_dict(state)
    says = two.experimental_distribute_dataset(SaysWhere())
    dataset.load_state_dict(says.state_dict())
    with two.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="Resume `fit` with .*BackupAndRestore"):
        model.fit(dataset, verbose=0)
    with pytest.raises(ValueError, match="reports its own position, and"):
        list(dataset)


@pytest.mark.skipif(not TENSORFLOW, reason="native datasets are TensorFlow's")
def test_native_dataset_error_names_alternative(two):
    import tensorflow as tf

    dataset = two.experimental_distribute_dataset(tf.data.Dataset.range(8).batch(4))
    with pytest.raises(NotImplementedError, match=r"dataset\.skip\(steps\)"):
        dataset.state_dict()
