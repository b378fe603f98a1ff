"""A process that is killed while it trains, and another one that goes on."""

import contextlib
import json
import signal
from pathlib import Path

import numpy as np
import pytest

from keras_strategy.testing import WorkerRunner
from tests.equality.compare import largest
from tests.processes import wait_until

pytestmark = pytest.mark.full

# Trains four epochs of four batches. What it knows of the last run is in the folder.
PROGRAM = '''
import json
import pathlib
import sys
import time

import keras
import numpy as np

import keras_strategy as ks

folder, dies = sys.argv[1], sys.argv[2] == "dies"
X = np.random.RandomState(0).randn(13, 3).astype("float32")
Y = np.random.RandomState(1).randn(13, 1).astype("float32")
keras.utils.set_random_seed(1)
strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.05, use_ema=True), "mse", metrics=["mae"])


class Report(keras.callbacks.Callback):
    """Tells when the third epoch has begun, and waits there for its end."""

    def on_train_batch_end(self, batch, logs=None):
        if dies and self.epoch == 2 and batch == 1:
            pathlib.Path(folder, "third epoch").touch()
            time.sleep(600)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        begun.append(epoch)


begun = []
history = model.fit(
    X,
    Y,
    batch_size=4,
    epochs=4,
    validation_data=(X[:5], Y[:5]),
    callbacks=[keras.callbacks.BackupAndRestore(folder + "/backup"), Report()],
    verbose=0,
).history
variables = [*model.variables, *model.optimizer.variables]
np.savez(folder + "/weights.npz", *[v.numpy() for v in variables])
print(json.dumps({"epochs": begun, "logs": history}))
'''


@contextlib.contextmanager
def started(starter, folder: Path, dies: bool):
    """Starts the program in a process of its own."""
    script = folder / "program.py"
    script.write_text(PROGRAM)
    with WorkerRunner(1, 2, timeout_seconds=200, starter=starter) as runner:
        runner.start(script, folder, "dies" if dies else "lives")
        yield runner


def finished(runner: WorkerRunner, folder: Path):
    """What a process that trained to the end said, and the variables it ended with."""
    (end,) = runner.wait()
    assert end.exit_status == 0, end.output
    with np.load(folder / "weights.npz") as file:
        variables = [file[name] for name in file.files]
    return json.loads(end.output.splitlines()[-1]), variables


def test_killed_training_resumes(starter, tmp_path):
    """As if it had never been killed, down to the last bit, but for its lost epoch."""
    folders = tmp_path / "whole", tmp_path / "killed"
    for folder in folders:
        folder.mkdir()
    with started(starter, folders[0], False) as whole_run:
        with started(starter, folders[1], True) as killed:
            wait_until((folders[1] / "third epoch").exists, 200)
            killed.kill(0)
            (end,) = killed.wait()
        assert end.exit_status == -signal.SIGKILL
        assert (folders[1] / "backup").is_dir()
        whole, expected = finished(whole_run, folders[0])
    with started(starter, folders[1], False) as again:
        resumed, variables = finished(again, folders[1])
    assert whole["epochs"] == [0, 1, 2, 3]
    assert resumed["epochs"] == [2, 3]
    for name, values in whole["logs"].items():
        assert resumed["logs"][name] == values[2:], name
    assert largest(expected, variables) == 0
    assert not (folders[1] / "backup").exists()  # Keras clears it when all is done
