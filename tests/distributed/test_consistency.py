"""Workers that train something else, or hold other values, raise an error."""

import time

import keras
import numpy as np
import pytest

import keras_strategy as ks
from keras_strategy.testing import WorkerRunner
from tests.distributed.jobs import agreements, classifier, digits


def fits_that_differ() -> dict[str, str]:
    """Return the errors when worker 1 is about to train something else."""
    import pandas

    strategy = ks.MultiWorkerMirroredStrategy()
    last = strategy.extended.local_replicas.start > 0
    x, y = digits(8)

    def schedule(epoch, rate):
        return 0.5 * rate

    def made(optimizer, activation=None, loss=None):
        with strategy.scope():
            if last:
                keras.layers.Dense(1)  # after which names count on
            model = keras.Sequential(
                [
                    keras.Input((6,)),
                    keras.layers.Dense(8, activation=activation),
                    keras.layers.Dense(3),
                ]
            )
            model.compile(
                optimizer, loss or keras.losses.SparseCategoricalCrossentropy(True)
            )
        return model

    def said(optimizer, activation=None, mine=(x, y), loss=None, **arguments):
        arguments = {"epochs": 1, "verbose": 2 * last, **arguments}
        return told(made(optimizer, activation, loss).fit, *mine, **arguments)

    def said_of_words(words):
        class Words(keras.layers.Dense):
            def __init__(self):
                super().__init__(3)
                self.lookup = keras.layers.StringLookup()

        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), Words()])
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(True))
        model.layers[0].lookup.adapt(np.array(words))
        return told(model.fit, x, y, verbose=0)

    def told(call, *args, **kwargs):
        try:
            call(*args, **kwargs)
        except (ks.errors.WorkersDifferError, ks.errors.WorkerInputError) as error:
            return str(error)
        return "no error"

    def with_epsilon(call):
        keras.config.set_epsilon(1e-3 if last else 1e-7)
        try:
            return call()
        finally:
            keras.config.set_epsilon(1e-7)

    sgd = keras.optimizers.SGD
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: dict(logs)
    )
    rates = keras.callbacks.LearningRateScheduler(schedule)
    stop = keras.callbacks.EarlyStopping("loss", patience=2 + last)
    other = x + last * (np.arange(8) == 3)[:, None]
    tensor, frame = keras.ops.convert_to_tensor(other), pandas.DataFrame(other)
    words = np.array([["a"], ["b" if last else "c"]], object)
    large = np.zeros((60_000, 6), "float32")  # more than is read of it
    large[-6_000:] = last
    model = made(sgd())
    on_batch = model.train_on_batch, model.test_on_batch, model.predict_on_batch
    return {
        "beta": said(keras.optimizers.Adam(beta_1=0.5 if last else 0.9)),
        "clipnorm": said(sgd(clipnorm=1.0 if last else None)),
        "class": said(sgd() if last else keras.optimizers.Adam()),
        "loss": said(sgd(), loss=_loss_of_last if last else _loss_of_first),
        "layer": said(sgd(), activation="tanh" if last else "relu"),
        "schedule": said(sgd(), callbacks=[rates] if last else []),
        "patience": said(sgd(), callbacks=[stop]),
        "epochs": said(sgd(), epochs=1 + last),
        "arrays": said(sgd(), mine=(other, y)),
        "tensors": said(sgd(), mine=(tensor, y)),
        "tables": said(sgd(), mine=(frame, y)),
        "words": said(sgd(), mine=(words, y[:2])),
        "large": said(sgd(), mine=(large, large[:, 0])),
        "weights": said(sgd(), sample_weight=tensor[:, 0]),
        "validation": said(sgd(), validation_data=(tensor, y)),
        "epsilon": with_epsilon(lambda: said(sgd())),
        "evaluate": told(model.evaluate, other, y),
        "predict": told(model.predict, frame),
        **{call.__name__: told(call, other) for call in on_batch},
        "rows": told(model.train_on_batch, x[: 4 + last], y[: 4 + last]),
        "Keras's": with_epsilon(lambda: told(model.evaluate, x, y)),
        "vocabulary": said_of_words(["a", "c" if last else "b"]),
        "batches": said(sgd(), mine=(((a, y) for a in [other, x]),)),
        # What may differ.
        "watch": said(sgd(), callbacks=[] if last else [watch], epochs=2),
        "rate": said(sgd(0.1 if last else 0.2)),
        "same vocabulary": said_of_words(["a", "b"]),
        "kinds": said(sgd(), mine=(pandas.DataFrame(x) if last else x, y)),
        "batch": told(model.train_on_batch, x, y),
    }


def _loss_of_first(y, p):
    return keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)


def _loss_of_last(y, p):
    return 2 * _loss_of_first(y, p)


def drifts(folder: str) -> dict[str, list[str]]:
    """Worker 1 changes a weight in the second epoch; what finds it, by what saves."""
    strategy = ks.MultiWorkerMirroredStrategy()
    last = strategy.extended.local_replicas.start > 0
    savers = {
        "nothing": [],
        "checkpoint": [keras.callbacks.ModelCheckpoint(f"{folder}/best.keras")],
        "backup": [ks.callbacks.BackupAndRestore(f"{folder}/backup")],
    }
    results = {}
    for name, callbacks in savers.items():
        with strategy.scope():
            model = classifier()
        kernel = model.layers[-1].kernel

        def change(epoch, logs, kernel=kernel):
            if last and epoch == 1:
                kernel.assign(keras.ops.convert_to_numpy(kernel) + 1e-3)

        seen = []
        callback = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs, seen=seen: seen.append(epoch),
            on_epoch_end=change,
        )
        told = "no error"
        with agreements(strategy) as asked:
            try:
                model.fit(
                    *digits(8), epochs=3, callbacks=[callback, *callbacks], verbose=0
                )
            except ks.errors.WorkersDifferError as error:
                told = str(error)
        ends = [name for name in asked if name == "the end of an epoch"]
        results[name] = [told, str(seen), str(len(ends))]
    return results


def chief_predicts_alone() -> None:
    """A callback of the chief alone has all workers wait."""
    strategy = ks.MultiWorkerMirroredStrategy()
    chief = strategy.is_chief
    with strategy.scope():
        model = classifier()
    x, y = digits(8)

    def alone(batch, logs):
        with strategy.extended.cluster.client.track_operation(
            "what the chief waits for"
        ):
            time.sleep(100)

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=alone)
    model.fit(x, y, callbacks=[callback] if chief else [], verbose=0)


ALIKE = {
    "beta": "optimizer.beta_1 (worker 0: 0.9; worker 1: 0.5)",
    "clipnorm": "optimizer.clipnorm (worker 0: None; worker 1: 1.0)",
    "class": "optimizer.class (worker 0: keras",
    "loss": f"loss (worker 0: {_loss_of_first.__module__}._loss_of_first; worker 1: ",
    "layer": "model.layers[0].activation (worker 0: relu; worker 1: tanh)",
    "schedule": "callbacks (worker 0: []; worker 1: ['LearningRateScheduler'])",
    "patience": "callback EarlyStopping.patience (worker 0: 2; worker 1: 3)",
    "epochs": "argument epochs (worker 0: 1; worker 1: 2)",
    "arrays": "argument x (worker 0: an array (8, 6) of float32, whose",
    "tensors": "argument x (worker 0: an array (8, 6) of float32, whose",
    "tables": "argument x (worker 0: an array (8, 6) of float32, whose",
    "words": "argument x (worker 0: an array (2, 1) of object, whose",
    "large": "argument x (worker 0: an array (60000, 6) of float32, whose",
    "weights": "argument sample_weight (worker 0: an array (8,) of float32, whose",
    "validation": "argument validation_data (worker 0: ['an array (8, 6) of",
    "epsilon": "keras.config.epsilon (worker 0: 1e-07; worker 1: 0.001)",
    "evaluate": "the same in `evaluate`. They differ in argument x",
    "predict": "the same in `predict`. They differ in argument x",
    "train_on_batch": "in `train_on_batch`. They differ in argument x",
    "test_on_batch": "in `test_on_batch`. They differ in argument x",
    "predict_on_batch": "in `predict_on_batch`. They differ in argument x",
    "rows": "argument x (worker 0: an array (4, 6) of float32, whose",
    "Keras's": "keras.config.epsilon (worker 0: 1e-07; worker 1: 0.001)",
    "vocabulary": "adapted layer 0 'string_lookup'.vocabulary (worker 0: ['[UNK]', 'b'",
    "batches": "Received different rows or values",
    "watch": "no error",
    "rate": "no error",
    "same vocabulary": "no error",
    "kinds": "no error",
    "batch": "no error",
}


@pytest.mark.full(keep_on="torch")
def test_differing_fit_arguments_are_reported(two_workers):
    pytest.importorskip("pandas")
    pytest.importorskip("tensorflow")
    for result in two_workers.run(fits_that_differ):
        assert result.keys() == ALIKE.keys()
        for case, said in result.items():
            assert ALIKE[case] in said, (case, said)


# At the end of the second epoch, or when they save before it; they ask each other once
# for each end.
DRIFTS = {
    "nothing": ("At the end of an epoch the", "2"),
    "checkpoint": ("At `save` to best.keras the", "1"),
    "backup": ("At the backup the", "1"),
}


@pytest.mark.full(keep_on="jax")
def test_diverging_weights_are_reported(two_workers, tmp_path):
    for results in two_workers.run(drifts, str(tmp_path)):
        assert results.keys() == DRIFTS.keys()
        for name, (told, epochs, asked) in results.items():
            begin, ends = DRIFTS[name]
            assert told.startswith(begin), told
            assert "The first variable that differs is" in told
            assert "kernel'" in told and "worker 0: " in told and "worker 1: " in told
            assert (epochs, asked) == ("[0, 1]", ends)


@pytest.mark.full(keep_on="torch")
def test_deadlock_is_reported(starter):
    with WorkerRunner(2, timeout_seconds=110, starter=starter) as runner:
        runner.start(chief_predicts_alone)
        ends = runner.wait()
    assert all(end.exit_status != 0 for end in ends)
    output = ends[0].output + ends[1].output
    said = "worker 0: `what the chief waits for`, worker 1: `"
    assert said in output
    assert "Their callbacks differ (worker 0: LambdaCallback; worker 1: none)" in output
