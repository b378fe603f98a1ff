"""Callbacks see what they see on one device."""

import csv
import itertools

import keras
import numpy as np
import pytest

from keras_strategy.testing.equality.compare import largest, scope

X = np.random.RandomState(0).randn(13, 3).astype("float32")
Y = np.random.RandomState(1).randn(13, 1).astype("float32")
callbacks = keras.callbacks


def compiled(**options):
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.05, **options), "mse", metrics=["mae"])
    return model


def trained(strategy, make_callbacks, epochs=4, model=compiled, **fit):
    keras.utils.set_random_seed(1)
    with scope(strategy):
        model = model()
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
    """Trains on one device and on three; returns both models when they agree."""
    one, one_logs = trained(None, make_callbacks, **options)
    many, many_logs = trained(mirrored(3), make_callbacks, **options)
    assert one_logs.keys() == many_logs.keys()
    for key, values in one_logs.items():
        assert largest([values], [many_logs[key]]) < 1e-5, key
    assert largest(one.get_weights(), many.get_weights()) < 2e-5
    return one, many


def test_early_stopping_restores_the_best_weights(mirrored):
    # With a start from which the validation loss rises, epoch 1 is the best.
    def stop():
        return [callbacks.EarlyStopping("val_mae", patience=1, mode="max")]

    _, logs = trained(mirrored(3), stop, epochs=20)
    assert 1 < len(logs["loss"]) < 20

    def restore():
        return [
            callbacks.EarlyStopping(
                "val_mae", patience=1, mode="max", restore_best_weights=True
            )
        ]

    same(restore, mirrored, epochs=20)


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
    def poisoned():
        model = compiled()
        kernel, *others = model.get_weights()
        model.set_weights([kernel * np.nan, *others])
        return model

    lengths = [
        len(trained(s, lambda: [callbacks.TerminateOnNaN()], 4, poisoned)[1]["loss"])
        for s in (None, mirrored(3))
    ]
    assert lengths == [1, 1]


def test_swap_ema_weights(mirrored):
    same(
        lambda: [callbacks.SwapEMAWeights(swap_on_epoch=True)],
        mirrored,
        model=lambda: compiled(use_ema=True, ema_momentum=0.5),
    )


def test_model_checkpoint(mirrored, tmp_path):
    files = itertools.count()

    def save():
        path = tmp_path / f"{next(files)}.keras"
        return [callbacks.ModelCheckpoint(path, "val_loss", save_best_only=True)]

    same(save, mirrored)
    one, many = (keras.saving.load_model(tmp_path / f"{i}.keras") for i in (0, 1))
    assert largest(one.get_weights(), many.get_weights()) < 2e-5
    assert one.optimizer.iterations == many.optimizer.iterations


def test_csv_logger(mirrored, tmp_path):
    files = itertools.count()
    same(lambda: [callbacks.CSVLogger(tmp_path / f"{next(files)}.csv")], mirrored)
    one, many = (list(csv.reader((tmp_path / f"{i}.csv").open())) for i in (0, 1))
    assert one[0] == many[0]
    np.testing.assert_allclose(
        np.array(one[1:], "float64"), np.array(many[1:], "float64"), atol=1e-5
    )


def test_backup_and_restore(mirrored, tmp_path):
    """Stopped in the third epoch and resumed: as if it had not been."""
    strategy = mirrored(3)

    class Stopped(Exception):
        pass

    def stop(epoch, logs):
        if epoch == 2:
            raise Stopped

    def backup():
        return [callbacks.BackupAndRestore(tmp_path / "backup")]

    # A shuffle would start anew with the resumed training, on one device too.
    order = {"shuffle": False}
    uninterrupted, _ = trained(strategy, lambda: [], **order)
    with pytest.raises(Stopped):
        trained(
            strategy,
            lambda: [callbacks.LambdaCallback(on_epoch_end=stop), *backup()],
            **order,
        )
    resumed, logs = trained(strategy, backup, **order)
    assert len(logs["loss"]) == 2  # the third epoch was lost with the exception
    assert largest(uninterrupted.get_weights(), resumed.get_weights()) < 1e-6


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


def test_weights_between_batches(mirrored):
    seen = []
    for strategy in (None, mirrored(3)):
        callback = Weights()
        # On JAX, Keras keeps the weights to itself in an epoch unless asked.
        fit = {"model": eager} if keras.backend.backend() == "jax" else {}
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

    assert calls(None) == calls(mirrored(3))
