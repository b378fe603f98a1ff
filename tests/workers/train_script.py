"""A program for `keras-strategy run`: `train_script.py RESULT BACKUP DIES`.

It trains for 4 epochs with backups and writes its weights to RESULT. If DIES is 1,
worker 1 kills itself in the third epoch, the first time that it gets there.
"""

import os
import pathlib
import signal
import sys

import keras
import numpy as np

import keras_strategy as ks
from tests.workers.jobs import classifier, digits, weights

result, backup, dies = sys.argv[1:]
marker = pathlib.Path(backup + ".died")
strategy = ks.MultiWorkerMirroredStrategy()
rank = strategy.extended.local_replicas.start
# Not `keras.utils.set_random_seed`, which takes seconds to import TensorFlow.
random = np.random.RandomState(3)


class Die(keras.callbacks.Callback):
    epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if rank == 1 and dies == "1" and self.epoch == 2 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


with strategy.scope():
    model = classifier()
model.set_weights([0.3 * random.randn(*w.shape) for w in model.get_weights()])
x, y = digits(29)
model.fit(
    x,
    y,
    batch_size=8,
    epochs=4,
    shuffle=False,  # a backup does not hold the state of the random numbers
    callbacks=[keras.callbacks.BackupAndRestore(backup), Die()],
    verbose=2,
)
if rank == 0:
    np.savez(result, *weights(model))
