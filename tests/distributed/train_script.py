"""A program for `keras-strategy run`: `train_script.py RESULT BACKUP [FAULT...]`.

It trains for 4 epochs with backups and writes its weights to RESULT. Each fault happens
to worker 1 in the epoch that `FAULTS` says, the first time that it gets there.
"""

import os
import pathlib
import signal
import sys

import keras
import numpy as np

import keras_strategy as ks
from tests.distributed.jobs import classifier, digits, weights

FAULTS = {"killed": (1, signal.SIGKILL), "preempted": (2, signal.SIGTERM)}
result, backup, *faults = sys.argv[1:]
strategy = ks.MultiWorkerMirroredStrategy()
rank = strategy.extended.local_replicas.start
# Not `keras.utils.set_random_seed`, which takes seconds to import TensorFlow.
random = np.random.RandomState(3)


class Faults(keras.callbacks.Callback):
    epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        for fault in faults if rank == 1 and batch == 2 else []:
            epoch, number = FAULTS[fault]
            marker = pathlib.Path(f"{backup}.{fault}")
            if self.epoch == epoch and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), number)


with strategy.scope():
    model = classifier()
model.set_weights([0.3 * random.randn(*w.shape) for w in model.get_weights()])
x, y = digits(29)
model.fit(
    x,
    y,
    batch_size=8,
    epochs=4,
    shuffle=False,  # the processes have drawn no common seed
    callbacks=[
        ks.callbacks.BackupAndRestore(backup, 2, save_before_preemption=True),
        Faults(),
    ],
    verbose=2,
)
if rank == 0:
    np.savez(result, *weights(model))
