"""Trainings that are backed up, as workers and as one process. See jobs.py."""

import json
import os
import shutil
import signal
import sys
from typing import Any

import keras
import numpy as np

import keras_strategy as ks
from tests.distributed.jobs import classifier, digits, weights


class Killed(Exception):
    pass


class _Killer(keras.callbacks.Callback):
    """Ends the second epoch after its third batch, where everybody is."""

    epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (1, 2):
            raise Killed


def train(folder: str, killed: bool = False, seed: int = 1, strategy: Any = None):
    """Trains three epochs of four batches in another order each, with Dropout.

    Returns:
        Weights, logs and how many steps there were; None if it was killed.
    """
    strategy = strategy or ks.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = classifier(noise=True)
    # The variables of the seeds stay what they are.
    trainable = np.random.RandomState(3)
    for variable in model.trainable_variables:
        variable.assign(0.3 * trainable.randn(*variable.shape))
    steps = []
    count = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: steps.append(batch)
    )
    backup = ks.callbacks.BackupAndRestore(folder, 2)
    x, y = digits(29)
    callbacks = [count, backup, *([_Killer()] if killed else [])]
    try:
        logs = model.fit(
            x, y, batch_size=8, epochs=3, verbose=0, callbacks=callbacks
        ).history
    except Killed:
        return None
    return {"weights": weights(model), "logs": logs, "steps": len(steps)}


def preempted(folder: str) -> Any:
    """Worker 1 alone is asked to end, in its second batch: how this one ends."""
    strategy = ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = classifier()

    def asked(batch, logs):
        if batch == 1 and strategy.extended.local_replicas.start == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    x, y = digits(29)
    backup = ks.callbacks.BackupAndRestore(folder, save_before_preemption=True)
    notice = keras.callbacks.LambdaCallback(on_train_batch_begin=asked)
    try:
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[notice, backup])
    except SystemExit as end:
        return end.code, int(model.optimizer.iterations.numpy())
    return None


def whole_and_resumed(folder: str) -> list[dict]:
    """A training, and one that goes on after it was killed; a copy of what is left."""
    whole = train(folder + "/whole")
    train(folder + "/resumed", killed=True)
    if ks.MultiWorkerMirroredStrategy().extended.cluster.is_chief:
        shutil.copytree(folder + "/resumed", folder + "/left")
    return [whole, train(folder + "/resumed", seed=99)]


class _Batches(keras.utils.PyDataset):
    """Batches whose order Keras draws from Python's generator, on every backend."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        x, y = digits(29)
        return x[index * 8 :][:8], y[index * 8 :][:8]


def train_anywhere(folder: str, killed: bool = False, replicas: int = 2):
    """Trains a model that draws no random numbers: those differ between engines.

    Returns:
        As `train`.
    """
    devices = [f"cpu:{i}" for i in range(replicas)]
    return _train_alike(folder, killed, replicas, ks.MirroredStrategy(devices))


def workers_train_anywhere(folder: str, killed: bool = False, seed: int = 1):
    """As `train_anywhere`, on workers."""
    return _train_alike(folder, killed, seed, ks.MultiWorkerMirroredStrategy())


def _train_alike(folder: str, killed: bool, seed: int, strategy: Any):
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, activation="tanh"),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.Dense(3),
            ]
        )
        rate = keras.optimizers.schedules.CosineDecay(0.01, 40)
        model.compile(
            keras.optimizers.AdamW(rate, global_clipnorm=1.0, use_ema=True),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    start = np.random.RandomState(3)
    for variable in model.trainable_variables:
        variable.assign(0.3 * start.randn(*variable.shape))
    backup = ks.callbacks.BackupAndRestore(folder, 1)
    callbacks = [backup, *([_Killer()] if killed else [])]
    try:
        logs = model.fit(_Batches(), epochs=3, verbose=0, callbacks=callbacks).history
    except Killed:
        return None
    return {"weights": weights(model), "logs": logs}


if __name__ == "__main__":
    backup_folder, result = sys.argv[1:]
    resumed = train_anywhere(backup_folder, replicas=3)
    assert resumed is not None
    np.savez(result, *resumed["weights"], logs=json.dumps(resumed["logs"]))
