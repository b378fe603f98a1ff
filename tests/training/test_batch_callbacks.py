"""Batches are told to whoever listens, and nothing is made of them for nobody."""

import collections

import keras
import numpy as np
import pytest
from keras import callbacks

import keras_strategy as ks
from keras_strategy.training.callbacks import LogFreeCallback
from tests.equality.compare import scope

X, Y = np.ones((12, 3), "float32"), np.ones((12, 1), "float32")
NAMES = [
    f"on_{kind}_batch_{time}"
    for kind in ("train", "test", "predict")
    for time in ("begin", "end")
]


@pytest.fixture
def told(monkeypatch):
    """How often Keras's list is told of batches, by the name of its method."""
    counts = collections.Counter()

    def counting(name):
        original = getattr(callbacks.CallbackList, name)

        def count(self, *args, **kwargs):
            counts[name] += 1
            return original(self, *args, **kwargs)

        return count

    for name in NAMES:
        monkeypatch.setattr(callbacks.CallbackList, name, counting(name))
    return counts


def compiled(strategy):
    with scope(strategy):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


class Listener(callbacks.Callback):
    """Keeps the numbers of batches from the second epoch on."""

    def __init__(self):
        super().__init__()
        self.batches = []

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.on_train_batch_end = self.keep

    def keep(self, batch, logs):
        self.batches.append(batch)
        assert np.isfinite(logs["loss"])


def loop(model, method, listening=()):
    options = {"batch_size": 4, "verbose": 0, "callbacks": list(listening)}
    if method == "predict":
        model.predict(X, **options)
    else:
        getattr(model, method)(X, Y, **options)


@pytest.mark.full(keep_on="torch")
@pytest.mark.needs_patch("CallbackList.on_epoch_begin", backend="jax", case="fit")
@pytest.mark.needs_patch("CallbackList.on_test_begin", backend="jax", case="evaluate")
@pytest.mark.needs_patch("CallbackList.on_predict_begin", backend="jax", case="predict")
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_unused_batch_callbacks_are_not_called(method, two, told):
    one_device = ks.OneDeviceStrategy(two.extended.worker_devices[0])
    for strategy in (one_device, two):
        loop(compiled(strategy), method)
        assert not told
    loop(compiled(None), method)  # not ours
    kind = {"fit": "train", "evaluate": "test", "predict": "predict"}[method]
    assert told == {f"on_{kind}_batch_begin": 3, f"on_{kind}_batch_end": 3}


def test_callback_added_later_is_called(two, told):
    listener = Listener()
    model = compiled(two)
    model.fit(X, Y, batch_size=4, epochs=3, verbose=0, callbacks=[listener])
    assert told == {"on_train_batch_end": 6}
    # Keras tells who begins later from several threads, and waits for them at the end
    # of an epoch.
    assert sorted(listener.batches[:3]) == sorted(listener.batches[3:]) == [0, 1, 2]
    began = []
    begins = callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: began.append(batch)
    )
    loop(model, "fit", [begins])
    assert began == [0, 1, 2]


class Counter(LogFreeCallback):
    """Counts batches, without a look at the logs."""

    count = 0

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1

    on_test_batch_end = on_train_batch_end


class Reader(callbacks.Callback):
    """Keeps the losses of batches."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def on_batch_end(self, batch, logs=None):
        logs = logs or {}
        self.losses.append(logs["loss"])

    on_test_batch_end = on_batch_end


@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_logs_that_no_callback_reads_are_not_computed(method, two, told):
    counter, reader = Counter(), Reader()
    model = compiled(two)
    loop(model, method, [counter])
    assert counter.count == 3 and not told
    loop(model, method, [counter, reader])
    assert counter.count == 6
    kind = {"fit": "train", "evaluate": "test"}[method]
    assert told == {f"on_{kind}_batch_end": 3}
    assert len(reader.losses) == 3 and all(np.isfinite(reader.losses))


def test_base_class_and_late_methods_are_called(two, told):
    """Methods that a class inherits, or that a callback gets in `on_train_begin`."""

    class Inherits(Reader):
        pass

    class Late(callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.logs = []
            self.on_batch_end = self.keep

        def keep(self, batch, logs):
            self.logs.append([k for k, v in logs.items() if np.isfinite(v)])

    late, reader = Late(), Inherits()
    loop(compiled(two), "fit", [reader])
    assert len(reader.losses) == 3 and all(np.isfinite(reader.losses))
    loop(compiled(two), "fit", [late])
    assert late.logs == [["loss"]] * 3


def test_checkpoint_between_batches_is_called(two, told, tmp_path):
    model = compiled(two)
    file = str(tmp_path / "{batch}.weights.h5")
    for often, saved in (("epoch", 0), (2, 1)):
        save = callbacks.ModelCheckpoint(
            file, save_freq=often, save_weights_only=True, monitor="loss"
        )
        if often == "epoch":
            save.filepath = str(tmp_path / "epoch.weights.h5")
        loop(model, "fit", [save])
        assert told["on_train_batch_end"] == 3 * saved
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "2.weights.h5",
        "epoch.weights.h5",
    ]


def test_callback_list_is_reusable_outside_scope(two, told):
    """And one that is of a class of its own is told itself."""
    own = callbacks.CallbackList([], add_history=True)
    for strategy, expected in ((two, 0), (None, 3)):
        model = compiled(strategy)
        own.set_model(model)
        model.fit(X, Y, batch_size=4, verbose=0, callbacks=own)
        assert told["on_train_batch_end"] == expected

    class Own(callbacks.CallbackList):
        batches = 0

        def on_train_batch_end(self, batch, logs=None):
            self.batches += 1

    model = compiled(two)
    own = Own([], add_history=True, model=model)
    model.fit(X, Y, batch_size=4, verbose=0, callbacks=own)
    assert own.batches == 3
