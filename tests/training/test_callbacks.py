"""Callbacks see what they see on one device."""

import csv
import itertools
import re

import keras
import numpy as np
import pytest

from tests.equality.compare import largest, scope
from tests.training.shared import SharedModels

X = np.random.RandomState(0).randn(13, 3).astype("float32")
Y = np.random.RandomState(1).randn(13, 1).astype("float32")
callbacks = keras.callbacks


def compiled(**options):
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.05, **options), "mse", metrics=["mae"])
    return model


shared = SharedModels(compiled, (X[:4], Y[:4]))


def trained(strategy, make_callbacks, epochs=4, make=None, **fit):
    if make is None:
        model = shared.fresh(strategy)
    else:
        keras.utils.set_random_seed(1)
        with scope(strategy):
            model = make()
    fit = {"validation_data": (X[:5], Y[:5]), **fit}
    history = model.fit(
        X,
        Y,
        batch_size=4,
        epochs=epochs,
        callbacks=make_callbacks(),
        verbose=0,
        **fit,
    )
    return model, history.history


def same(make_callbacks, mirrored, **options):
    """Trains on one device and on two; returns both models when they agree."""
    one, one_logs = trained(None, make_callbacks, **options)
    many, many_logs = trained(mirrored(2), make_callbacks, **options)
    assert one_logs.keys() == many_logs.keys()
    for key, values in one_logs.items():
        assert largest([values], [many_logs[key]]) < 1e-5, key
    assert largest(one.get_weights(), many.get_weights()) < 2e-5
    return one, many


@pytest.mark.full(keep_on="tensorflow")
def test_early_stopping_restores_the_best_weights(mirrored):
    # With a start from which the validation loss rises, epoch 1 is the best.
    def stop():
        return [callbacks.EarlyStopping("val_mae", patience=1, mode="max")]

    _, logs = trained(mirrored(2), stop, epochs=20)
    assert 1 < len(logs["loss"]) < 20

    def restore():
        return [
            callbacks.EarlyStopping(
                "val_mae", patience=1, mode="max", restore_best_weights=True
            )
        ]

    same(restore, mirrored, epochs=20)


@pytest.mark.full(keep_on="jax")
@pytest.mark.parametrize(
    "make",
    [
        lambda: [callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)],
        lambda: [callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=10.0)],
        lambda: [callbacks.TerminateOnNaN()],
    ],
    ids=["LearningRateScheduler", "ReduceLROnPlateau", "TerminateOnNaN"],
)
def test_learning_rates(make, mirrored):
    one, many = same(make, mirrored)
    rates = [float(model.optimizer.learning_rate) for model in (one, many)]
    assert rates[0] == pytest.approx(rates[1])


def test_terminate_on_nan(mirrored):
    for strategy in (None, mirrored(2)):
        model = shared.fresh(strategy)
        kernel, *others = model.get_weights()
        model.set_weights([kernel * np.nan, *others])
        stop = [callbacks.TerminateOnNaN()]
        history = model.fit(X, Y, 4, epochs=2, callbacks=stop, verbose=0).history
        assert len(history["loss"]) == 1


@pytest.mark.full(keep=1, keep_on="jax")
@pytest.mark.parametrize("swap_on_epoch", [False, True])
def test_swap_ema_weights(swap_on_epoch, mirrored, tmp_path):
    """Into the model for what is validated and saved, and out of it again."""
    files = itertools.count()

    def swap():
        return [
            callbacks.SwapEMAWeights(swap_on_epoch),
            callbacks.ModelCheckpoint(tmp_path / f"{next(files)}.keras"),
        ]

    same(
        swap,
        mirrored,
        make=lambda: compiled(use_ema=True, ema_momentum=0.5),
        epochs=2,
    )
    one, many = (keras.saving.load_model(tmp_path / f"{i}.keras") for i in (0, 1))
    assert largest(one.get_weights(), many.get_weights()) < 2e-5


@pytest.mark.full(keep_on="jax")
def test_model_checkpoint(mirrored, tmp_path):
    files = itertools.count()

    def save():
        path = tmp_path / f"{next(files)}.keras"
        return [callbacks.ModelCheckpoint(path, "val_loss", save_best_only=True)]

    same(save, mirrored)
    one, many = (keras.saving.load_model(tmp_path / f"{i}.keras") for i in (0, 1))
    assert largest(one.get_weights(), many.get_weights()) < 2e-5
    assert one.optimizer.iterations == many.optimizer.iterations


def test_checkpoints_between_batches(mirrored, tmp_path):
    """What is saved after every second batch is what one device has then."""
    runs = itertools.count()

    def save():
        path = tmp_path / str(next(runs)) / "{epoch}-{batch}.weights.h5"
        path.parent.mkdir()
        return [callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=2)]

    same(save, mirrored, epochs=2)
    saved = sorted(path.name for path in (tmp_path / "0").iterdir())
    assert len(saved) == 4
    assert saved == sorted(path.name for path in (tmp_path / "1").iterdir())
    for name in saved:
        one, many = compiled(), compiled()
        one.load_weights(tmp_path / "0" / name)
        many.load_weights(tmp_path / "1" / name)
        assert largest(one.get_weights(), many.get_weights()) < 2e-5


@pytest.mark.full(keep_on="tensorflow")
def test_csv_logger(mirrored, tmp_path):
    files = itertools.count()
    same(lambda: [callbacks.CSVLogger(tmp_path / f"{next(files)}.csv")], mirrored)
    one, many = (list(csv.reader((tmp_path / f"{i}.csv").open())) for i in (0, 1))
    assert one[0] == many[0]
    np.testing.assert_allclose(
        np.array(one[1:], "float64"), np.array(many[1:], "float64"), atol=1e-5
    )


def events(folder):
    """What TensorBoard shows of a folder, by tag: steps, and scalars or kinds."""
    loader = pytest.importorskip("tensorboard.backend.event_processing")
    from tensorboard.backend.event_processing import event_accumulator
    from tensorboard.util import tensor_util

    del loader
    found = {}
    for run in sorted(path.name for path in folder.iterdir()):
        accumulator = event_accumulator.EventAccumulator(
            str(folder / run), size_guidance={event_accumulator.TENSORS: 0}
        )
        accumulator.Reload()
        for tag in accumulator.Tags()["tensors"]:
            kind = accumulator.SummaryMetadata(tag).plugin_data.plugin_name
            for event in accumulator.Tensors(tag):
                value = tensor_util.make_ndarray(event.tensor_proto)
                if kind == "histograms":  # a bucket's edges, and what is in it
                    value = [value[0, 0], value[-1, 1], value[:, 2].sum()]
                is_number = kind in ("scalars", "histograms")
                found[run, tag, event.step] = value if is_number else 0.0
    return found


@pytest.mark.full(keep_on="jax")
def test_tensor_board(mirrored, tmp_path):
    """It needs TensorFlow on every backend, on one device too."""
    pytest.importorskip("tensorflow")
    runs = itertools.count()

    def board():
        return [
            callbacks.TensorBoard(
                tmp_path / str(next(runs)),
                histogram_freq=1,
                write_images=True,
                update_freq=1,
            )
        ]

    same(board, mirrored, epochs=2)
    one, many = events(tmp_path / "0"), events(tmp_path / "1")
    names = [re.sub(r"_\d+/", "/", "/".join(map(str, key))) for key in one]
    assert len({n for n in names if n.startswith("train/batch_loss/")}) == 8
    assert "train/epoch_loss/1" in names and "validation/epoch_mae/1" in names
    assert any("kernel/histogram" in name for name in names)
    assert names == [re.sub(r"_\d+/", "/", "/".join(map(str, key))) for key in many]
    assert largest(list(one.values()), list(many.values())) < 2e-5


@pytest.mark.full(keep=1, keep_on="jax")
def test_backup_and_restore(mirrored, tmp_path):
    """Stopped in the third epoch and resumed: as if it had not been."""
    strategy = mirrored(2)

    class Stopped(Exception):
        pass

    def stop(epoch, logs):
        if epoch == 2:
            raise Stopped

    def backup():
        return [callbacks.BackupAndRestore(tmp_path / "backup")]

    uninterrupted, _ = trained(strategy, lambda: [], make=compiled)
    with pytest.raises(Stopped):
        trained(
            strategy,
            lambda: [callbacks.LambdaCallback(on_epoch_end=stop), *backup()],
            make=compiled,
        )
    resumed, logs = trained(strategy, backup, make=compiled)
    assert len(logs["loss"]) == 2  # the third epoch was lost with the exception
    assert largest(uninterrupted.get_weights(), resumed.get_weights()) == 0


class Weights(callbacks.Callback):
    """Reads the weights at the end of each batch, and changes them once."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append([np.array(w) for w in self.model.get_weights()])
        self.seen[-1].append(np.array(logs["loss"]))
        if batch == 1:
            self.model.layers[-1].kernel.assign(
                keras.ops.multiply(self.model.layers[-1].kernel, 0.5)
            )


@pytest.mark.full(keep_on="torch")
def test_weights_between_batches(mirrored):
    seen = []
    for strategy in (None, mirrored(2)):
        callback = Weights()
        # On JAX, Keras keeps the weights to itself in an epoch unless asked.
        fit = {"make": eager} if keras.backend.backend() == "jax" else {}
        trained(strategy, lambda callback=callback: [callback], epochs=2, **fit)
        seen.append(callback.seen)
    assert len(seen[0]) == len(seen[1]) == 8
    for one, many in zip(*seen, strict=True):
        assert largest(one, many) < 2e-5


def eager():
    model = compiled()
    model.run_eagerly = True
    return model


def test_batch_and_epoch_numbers(mirrored):
    def calls(strategy):
        seen = []
        names = [
            f"on_{kind}_{what}"
            for kind in ("train_batch", "test_batch", "epoch")
            for what in ("begin", "end")
        ]

        def note(name):
            return lambda number, logs=None: seen.append(
                (name, number, sorted(logs or ()))
            )

        callback = callbacks.Callback()
        for name in names:
            setattr(callback, name, note(name))
        trained(strategy, lambda: [callback], epochs=2)
        return seen

    assert calls(None) == calls(mirrored(2))


class Busy(callbacks.Callback):
    """Does with the model what one does between epochs, and between batches."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.01 * (batch + 1)

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        self.seen += [
            self.model.predict(X, batch_size=4, verbose=0),
            self.model.predict_on_batch(X[:5]),
            keras.ops.convert_to_numpy(self.model(X[:2])),
            self.model.evaluate(X, Y, batch_size=4, verbose=0),
            sorted(logs),
        ]
        self.model.stop_training = False


@pytest.mark.full(keep_on="jax")
def test_callback_can_use_model(mirrored):
    """Between epochs; with a rate for each batch, and epochs cut short."""
    busy = []

    def make():
        busy.append(Busy())
        return busy[-1:]

    same(make, mirrored, epochs=2)
    one, many = busy
    assert len(one.seen) == len(many.seen) == 10
    for a, b in zip(one.seen, many.seen, strict=True):
        if isinstance(a[0], str):
            assert a == b == ["loss", "mae", "val_loss", "val_mae"]
        else:
            assert largest([a], [b]) < 1e-5


class Batches(callbacks.Callback):
    """Keeps what evaluate and predict tell about each batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_test_batch_end(self, batch, logs=None):
        self.seen += [batch, logs["loss"], logs["mae"]]

    def on_predict_batch_end(self, batch, logs=None):
        self.seen += [batch, keras.ops.convert_to_numpy(logs["outputs"])]


def test_evaluate_and_predict_batch_numbers(mirrored):
    """A callback gets the predictions of all rows of a batch, in order."""

    def seen(strategy):
        model, callback = shared.fresh(strategy), Batches()
        options = {"batch_size": 4, "verbose": 0, "callbacks": [callback]}
        model.evaluate(X, Y, **options)
        model.predict(X, **options)
        return callback.seen

    one, many = seen(None), seen(mirrored(2))
    assert len(one) == 4 * 3 + 4 * 2
    assert [np.shape(value) for value in one[13::2]] == [(4, 1)] * 3 + [(1, 1)]
    assert largest(one, many) < 1e-5


def test_initial_epoch(mirrored):
    """`initial_epoch`, a `CallbackList` of one's own, and verbose logs."""

    def lists():
        return callbacks.CallbackList(
            [callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))],
            add_history=True,
            add_progbar=False,
            model=None,
            epochs=4,
        )

    found = []
    for strategy in (None, mirrored(2)):
        model, own = shared.fresh(strategy), lists()
        own.set_model(model)
        model.fit(X, Y, 4, epochs=4, initial_epoch=2, callbacks=own, verbose=0)
        found.append([*model.get_weights(), model.optimizer.learning_rate.numpy()])
        assert model.history.epoch == [2, 3]
    assert largest(*found) < 2e-5
