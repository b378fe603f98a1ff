"""Batches that a thread reads ahead, in loops and in `fit`."""

import threading
import traceback

import keras
import numpy as np
import pytest

import keras_strategy as ks
from conformance.compare import largest, scope
from keras_strategy.data.prefetch import (
    Prefetcher,
    prefetch_disabled,
    stop_prefetchers_on_exit,
)

WAIT = 60.0  # seconds, for what happens at once
TENSORFLOW = keras.backend.backend() == "tensorflow"


def readers():
    names = (thread.name for thread in threading.enumerate())
    return [name for name in names if name.startswith("keras_strategy prefetch")]


@pytest.fixture(autouse=True)
def _no_reader_is_left():
    yield
    assert readers() == []


class Noted:
    """An iterator of numbers that records those read, and fails at a given one."""

    def __init__(self, number, fails=None):
        self.read = [threading.Event() for _ in range(number)]
        self.threads = []
        self._items = iter(range(number))
        self._fails = fails

    def __iter__(self):
        return self

    def __next__(self):
        item = next(self._items)
        self.threads.append(threading.current_thread())
        self.read[item].set()
        if item == self._fails:
            raise OSError(f"item {item} cannot be read")
        return item

    def were_read(self):
        return sum(event.is_set() for event in self.read)


# --- reading ahead


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_prefetch_depth_is_the_limit(depth):
    noted = Noted(8)
    reading = Prefetcher(noted, depth)
    assert noted.were_read() == 0
    for taken in range(8):
        assert next(reading) == taken
        last = min(taken + depth, 7)
        assert noted.read[last].wait(WAIT)
        assert noted.were_read() == last + 1
    assert list(reading) == list(reading) == []
    first, *others = noted.threads
    # What belongs to the beginning of an epoch, such as its order, is drawn here.
    assert first is threading.current_thread()
    assert first not in others


def test_prefetch_stops_at_epoch_end():
    noted = Noted(8)
    reading = Prefetcher(noted, 3, pauses=(4, 6))
    for taken, read in ((0, 4), (1, 4), (2, 4), (3, 4), (4, 6), (5, 6), (6, 8)):
        assert next(reading) == taken
        assert noted.read[read - 1].wait(WAIT)
        assert noted.were_read() == read
    reading.stop()


def test_error_is_raised_at_its_item():
    noted = Noted(5, fails=2)
    reading = Prefetcher(noted, 2)
    assert [next(reading), next(reading)] == [0, 1]
    with pytest.raises(OSError, match="item 2 cannot") as raised:
        next(reading)
    frames = traceback.extract_tb(raised.tb)
    assert frames[-1].line == 'raise OSError(f"item {item} cannot be read")'
    assert list(reading) == []
    assert noted.were_read() == 3
    reading.stop()


def test_paused_reader_keeps_prefetched_items():
    noted = Noted(6)
    with stop_prefetchers_on_exit():
        reading = Prefetcher(noted, 2)
        assert next(reading) == 0
        assert noted.read[2].wait(WAIT)
        assert len(readers()) == 1
    assert readers() == []
    assert list(reading) == [1, 2, 3, 4, 5]


def test_single_batch_reads_no_more():
    noted = Noted(3)
    with prefetch_disabled():
        assert next(Prefetcher(noted, 2)) == 0
    assert noted.were_read() == 1


def test_dropped_iterator_ends_its_thread():
    reading = Prefetcher(Noted(4), 1)
    next(reading)
    (thread,) = [
        t for t in threading.enumerate() if "keras_strategy prefetch" in t.name
    ]
    del reading
    thread.join(WAIT)


def test_ctrl_c_loses_no_batch(monkeypatch):
    """The batch that was being read comes next."""
    goes_on = threading.Event()

    def items():
        yield 0
        goes_on.wait(WAIT)
        yield 1

    reading = Prefetcher(items(), 1)
    assert next(reading) == 0
    future = reading._pending[0]
    result = future.result

    def interrupted():
        monkeypatch.setattr(future, "result", result)
        raise KeyboardInterrupt

    monkeypatch.setattr(future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(reading)
    goes_on.set()
    assert list(reading) == [1]


# --- custom loops


def batches_of(noted):
    for item in noted:
        yield np.full((4, 2), item, "float32")


def firsts(strategy, elements):
    local = strategy.experimental_local_results
    return [float(keras.ops.convert_to_numpy(local(x)[0])[0, 0]) for x in elements]


class Source:
    """Rows that can be indexed, and note that they were read."""

    def __init__(self, rows, x, y):
        self.rows, self.x, self.y = rows, x, y
        self.read = [threading.Event() for _ in range(rows)]

    def __len__(self):
        return self.rows

    def __getitem__(self, row):
        self.read[row].set()
        return self.x[row], self.y[row]


@pytest.mark.parametrize("options", [{}, {"experimental_fetch_to_device": False}])
def test_custom_loop_prefetches_with_options(options, two):
    for strategy in (two, ks.OneDeviceStrategy("cpu:0")):
        noted = Noted(4)
        given = ks.InputOptions(experimental_per_replica_buffer_size=2, **options)
        dataset = strategy.experimental_distribute_dataset(batches_of(noted), given)
        iterator = iter(dataset)
        elements = [next(iterator)]
        assert noted.read[2].wait(WAIT)
        assert noted.were_read() == 3
        elements += iterator
        assert firsts(strategy, elements) == [0.0, 1.0, 2.0, 3.0]


class Refilled:
    """Batches in one array, which is filled again and again."""

    def __init__(self):
        self.filled = [threading.Event() for _ in range(3)]

    def __iter__(self):
        buffer = np.zeros((4, 2), "float32")
        for item in range(3):
            buffer[:] = item
            self.filled[item].set()
            yield buffer


@pytest.mark.parametrize("to_device", [True, False])
def test_prefetched_batch_is_a_copy(to_device, two):
    refilled = Refilled()
    options = ks.InputOptions(to_device, experimental_per_replica_buffer_size=3)
    iterator = iter(two.experimental_distribute_dataset(refilled, options))
    elements = [next(iterator)]
    assert refilled.filled[2].wait(WAIT)
    assert firsts(two, [*elements, *iterator]) == [0.0, 1.0, 2.0]


def test_per_replica_batches_are_prefetched(two):
    noted = Noted(6)
    options = ks.InputOptions()
    dataset = two.distribute_datasets_from_function(
        lambda context: batches_of(noted), options
    )
    iterator = iter(dataset)
    first = next(iterator)
    assert noted.read[2].wait(WAIT)
    assert firsts(two, [first, *iterator]) == [0.0, 2.0, 4.0]


def test_no_visible_prefetch_by_default(two):
    for options in (None, ks.InputOptions(experimental_per_replica_buffer_size=0)):
        noted = Noted(4)
        dataset = two.experimental_distribute_dataset(batches_of(noted), options)
        for taken, _ in enumerate(dataset):
            assert noted.were_read() == taken + 1
            assert readers() == []


def test_ended_loop_loses_no_generator_batch(two):
    noted = Noted(5)
    options = ks.InputOptions(experimental_per_replica_buffer_size=2)
    dataset = two.experimental_distribute_dataset(batches_of(noted), options)
    for _ in dataset:
        assert noted.read[2].wait(WAIT)
        break
    assert firsts(two, dataset) == [1.0, 2.0, 3.0, 4.0]
    with pytest.raises(RuntimeError, match="have been read"):
        iter(dataset)


def test_source_error_is_raised_in_loop(two):
    dataset = two.experimental_distribute_dataset(
        batches_of(Noted(3, fails=1)), ks.InputOptions()
    )
    with pytest.raises(OSError, match="item 1 cannot be read"):
        list(dataset)


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="_buffer_size=-1"):
        ks.InputOptions(experimental_per_replica_buffer_size=-1)
    with pytest.raises(ValueError, match="prefetch=-1"):
        ks.IndexedDataset([1], 1, prefetch=-1)


# --- fit

RNG = np.random.RandomState(3)
X = RNG.randn(22, 3).astype("float32")
Y = RNG.randn(22, 1).astype("float32")
BATCH = 8


def make(strategy):
    keras.utils.set_random_seed(1)
    with scope(strategy):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def indexed(**arguments):
    source = Source(len(X), X, Y)
    return source, ks.IndexedDataset(source, BATCH, shuffle=False, **arguments)


def test_fit_prefetches_indexed_dataset(two):
    source, dataset = indexed()
    seen = []

    def while_it_trains(step, logs):
        if step < 2:
            seen.append(source.read[min(8 * step + 15, 21)].wait(WAIT))
            # One of ours, or what Keras has for TensorFlow.
            assert TENSORFLOW or len(readers()) == 1

    for event in source.read:
        event.clear()
    watch = keras.callbacks.LambdaCallback(on_train_batch_end=while_it_trains)
    model = make(two)
    model.fit(dataset, shuffle=False, verbose=0, callbacks=[watch])
    assert seen == [True, True]
    assert readers() == []


@pytest.mark.full(keep_on="torch")
@pytest.mark.parametrize("steps", [None, 2])
def test_prefetched_fit_equals_one_device(steps, two):
    """In the order of one device, also where an epoch ends before the data does."""
    weights = []
    for strategy in (None, two):
        model = make(strategy)
        dataset = ks.IndexedDataset(
            Source(len(X), X, Y), BATCH, shuffle=True, seed=5, prefetch=2
        )
        held_out = ks.IndexedDataset(Source(len(X), X, Y), BATCH)
        history = model.fit(
            dataset,
            epochs=3,
            steps_per_epoch=steps,
            validation_data=held_out,
            validation_steps=1,
            verbose=0,
        )
        weights.append([*model.get_weights(), *history.history.values()])
        assert readers() == []
    assert largest(*weights) < 2e-5


@pytest.mark.full(keep_on="tensorflow")
@pytest.mark.needs_patch("PyDatasetAdapter._get_iterator", backend="tensorflow")
def test_epoch_order_is_independent_of_prefetch(two):
    """An epoch takes two of three: TensorFlow may read the third before its end.

    Keras tells the dataset of the end while a thread of TensorFlow's reads on.
    """

    class Dataset(ks.IndexedDataset):
        """Reads the third batch of a pass before or after the first epoch's end."""

        def rows_of(self, index):
            if index == 2:
                assert not (TENSORFLOW and self.late) or self.ended.wait(WAIT)
                numbers = super().rows_of(index)
                self.was_read.set()
                return numbers
            return super().rows_of(index)

    def train(strategy, late):
        dataset = Dataset(Source(len(X), X, Y), BATCH, shuffle=True, seed=5)
        dataset.late = late
        dataset.ended, dataset.was_read = threading.Event(), threading.Event()

        def before_the_end(step, logs):
            assert late or step == 0 or not TENSORFLOW or dataset.was_read.wait(WAIT)

        watch = keras.callbacks.LambdaCallback(
            on_train_batch_end=before_the_end,
            on_epoch_begin=lambda epoch, logs: epoch == 1 and dataset.ended.set(),
        )
        model = make(strategy)
        options = {"epochs": 2, "steps_per_epoch": 2, "shuffle": False, "verbose": 0}
        model.fit(dataset, callbacks=[watch], **options)
        return model.get_weights()

    expected = train(None, late=True)
    for strategy, late in ((None, False), (two, True), (two, False)):
        assert largest(expected, train(strategy, late)) < 2e-5


class Fails(keras.callbacks.Callback):
    def __init__(self, error=None):
        super().__init__()
        self.error = error

    def on_train_batch_end(self, batch, logs=None):
        if self.error is not None:
            raise self.error
        self.model.stop_training = True


@pytest.mark.full(keep_on="jax")
@pytest.mark.parametrize("error", [None, KeyError("mine"), KeyboardInterrupt()])
def test_early_end_of_fit_leaves_no_thread(error, two):
    _, dataset = indexed(prefetch=2)
    model = make(two)

    def fit():
        model.fit(dataset, verbose=0, callbacks=[Fails(error)])

    if error is None:
        fit()
    else:
        with pytest.raises(type(error)):
            fit()
    assert readers() == []


@pytest.mark.skipif(TENSORFLOW, reason="Keras reads it in a thread of tf.data")
def test_fit_prefetches_with_options(two):
    noted = Noted(3)

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            noted.read[index].set()
            rows = slice(index * BATCH, (index + 1) * BATCH)
            return X[rows], Y[rows]

    def while_it_trains(step, logs):
        assert noted.read[min(step + 1, 2)].wait(WAIT)

    plain, model = make(None), make(two)
    plain.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    dataset = two.experimental_distribute_dataset(Batches(), ks.InputOptions())
    for event in noted.read:
        event.clear()
    watch = keras.callbacks.LambdaCallback(on_train_batch_end=while_it_trains)
    model.fit(dataset, shuffle=False, verbose=0, callbacks=[watch])
    assert largest(plain.get_weights(), model.get_weights()) < 2e-5


@pytest.mark.skipif(TENSORFLOW, reason="tf.data makes another error of it")
def test_source_error_is_raised_in_fit(two):
    class Broken(Source):
        def __getitem__(self, row):
            if row == 20:
                raise OSError("row 20 cannot be read")
            return super().__getitem__(row)

    dataset = ks.IndexedDataset(Broken(len(X), X, Y), BATCH)
    with pytest.raises(OSError, match="row 20 cannot be read") as raised:
        make(two).fit(dataset, shuffle=False, verbose=0)
    last = traceback.extract_tb(raised.tb)[-1]
    assert last.line == 'raise OSError("row 20 cannot be read")'
