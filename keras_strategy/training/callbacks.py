"""Callbacks: backups, and coordination of several workers.

`BackupAndRestore` schedules backups; `keras_patches.resume` defines their content and
restores Keras's loop.

All workers run the same program, so all of them create callbacks that write, restore
and stop training. The chief alone writes, and all workers start and stop together.
"""

import math
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import keras

from keras_strategy.cluster.elastic import elastic_worker
from keras_strategy.cluster.preemption import NextAction, Preemption
from keras_strategy.options import TerminationConfig
from keras_strategy.training.checkpoint import BackupFolder


class LogFreeCallback(keras.callbacks.Callback):
    """Callback that does not use the logs of a batch, for which Keras waits."""


class BackupAndRestore(keras.callbacks.Callback):
    """Backs up the training state, so that an interrupted `fit` can resume exactly.

    When you run `fit` again with the same arguments, it resumes at the next batch and
    ends as if it had not been interrupted. A backup contains the weights, the
    optimizers, the metrics of the current epoch, the states of all random generators,
    the epoch, the batch, and the dataset state. You can resume with another number of
    replicas or workers, and on another backend.

    The folder keeps the last two backups. Each is written atomically. If one is
    damaged, its name is logged and the one before it is used. With several workers, the
    chief writes and reads the backups. If `shard=` is set, each worker writes the
    shards that it stores, and the folder must be one that all workers share.

    A `keras.callbacks.BackupAndRestore` behaves like this one on a model of a strategy
    with several replicas.

    Args:
        backup_dir: The folder, which no other `fit` may use.
        save_freq: "epoch" to save at the end of each epoch, or a number of batches.
        delete_checkpoint: Whether to remove the backups when training has ended.
        save_before_preemption: Whether a SIGTERM to any worker, which a scheduler sends
            before it takes a machine away, makes all workers save after the current
            batch and exit with code 75. The workers exchange this after every batch and
            epoch. An `experimental.TerminationConfig` configures other signals of a
            preemption, the time limit, and the exit.
        asynchronous: Whether training goes on while a backup is written, for which the
            host's memory holds a copy of what this worker writes. A failed write is
            raised by the next backup, or at the end of `fit`.

    Example:

    ```python
    import keras
    import numpy as np
    import keras_strategy as ks

    with ks.MirroredStrategy().scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y = np.ones((8, 2)), np.ones((8, 1))
    backup = ks.callbacks.BackupAndRestore("backup", save_freq=100)
    model.fit(x, y, epochs=2, verbose=0, callbacks=[backup])
    ```
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike,
        save_freq: int | str = "epoch",
        delete_checkpoint: bool = True,
        save_before_preemption: bool | TerminationConfig = False,
        asynchronous: bool = False,
    ):
        super().__init__()
        if not os.fspath(backup_dir) or "://" in os.fspath(backup_dir):
            raise ValueError(
                "`backup_dir` must be a folder in the file system. Received: "
                f"{backup_dir!r}"
            )
        if save_freq != "epoch" and not _is_positive(save_freq):
            raise ValueError(
                "`save_freq` must be 'epoch' or a number of batches, 1 or more. "
                f"Received: {save_freq!r}"
            )
        config = save_before_preemption
        if isinstance(config, TerminationConfig) and config.save_fn is not None:
            raise ValueError(
                "BackupAndRestore saves by itself. Use a TerminationConfig with a "
                "`save_fn` for `experimental.PreemptionCheckpointHandler` only."
            )
        self.backup_dir = backup_dir
        self.save_freq = save_freq
        self.delete_checkpoint = delete_checkpoint
        self.save_before_preemption = save_before_preemption
        self.asynchronous = asynchronous
        self._training: Any = None  # a `keras_patches.resume.ResumableFit`

    # Whether `fit` resumes, and how many backups are kept.
    resumes = True
    max_to_keep = 2

    def attach(self, training: Any) -> None:
        """Set the `fit` in which this callback is called.

        Args:
            training: The training; None when it ends.
        """
        self._training = training

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore the last backup."""
        if self._training is None:
            raise RuntimeError(
                f"`keras_strategy.callbacks.{type(self).__name__}` works with `fit` "
                "of a model that was created in the scope of a strategy. Create the "
                "model inside `with strategy.scope():`, for one device with a "
                "`OneDeviceStrategy`."
            )
        if self.resumes:
            self._training.restore()

    def on_train_end(self, logs: Any = None) -> None:
        """Wait for the last backup; remove all if `delete_checkpoint` is set."""
        if self._training is not None:
            self._training.wait()
            if self.delete_checkpoint:
                self._training.clear()

    @property
    def saves_on_demand(self) -> bool:
        """True if all workers save after any batch when one of them has to stop."""
        is_elastic = self.resumes and elastic_worker() is not None
        return bool(self.save_before_preemption) or is_elastic

    def saver(self, training: Any) -> keras.callbacks.Callback:
        """Return the callback that saves, to run after all others.

        Args:
            training: The training that it saves.
        """
        config = self.save_before_preemption
        if self.saves_on_demand:
            if not isinstance(config, TerminationConfig):
                config = TerminationConfig()
            return _SavesBeforePreemption(training, self.save_freq, config)
        if isinstance(self.save_freq, int):
            return _SavesAfterBatches(training, self.save_freq)
        return _SavesAfterEpochs(training)


class ShardedCheckpoint(BackupAndRestore):
    """Saves the model, its optimizer and the state of training while `fit` goes on.

    Under `shard="optimizer"` and `shard="parameters"` each worker writes the shards
    that it stores, and nothing is gathered. A checkpoint counts once all files are
    complete: after a failure at any time, the one before it is there.

    `load_checkpoint` reads the last checkpoint under any number of devices and workers,
    under any `shard=`, on any backend, and without a strategy. `BackupAndRestore(path)`
    resumes the training exactly.

    Args:
        path: The folder, which no other `fit` may use. With `shard=` and several
            workers, all of them must share it.
        every: "epoch" to save at the end of each epoch, or a number of batches.
        asynchronous: Whether training goes on while a checkpoint is written, for which
            the host's memory holds a copy of what this worker writes. A failed write is
            raised by the next checkpoint, or at the end of `fit`.
        max_to_keep: How many checkpoints the folder keeps.

    Raises:
        ValueError: If an argument is invalid.

    Example:

    ```python
    import keras
    import numpy as np
    import keras_strategy as ks

    with ks.MirroredStrategy().scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    x, y = np.ones((8, 2)), np.ones((8, 1))
    checkpoint = ks.callbacks.ShardedCheckpoint("checkpoints", every=1)
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[checkpoint])
    loaded = ks.callbacks.load_checkpoint("checkpoints")
    np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])
    ```
    """

    resumes = False

    def __init__(
        self,
        path: str | os.PathLike,
        every: int | str = "epoch",
        asynchronous: bool = True,
        max_to_keep: int = 2,
    ):
        if every != "epoch" and not _is_positive(every):
            raise ValueError(
                "Argument `every` must be 'epoch' or a number of batches, 1 or more. "
                f"Received: every={every!r}"
            )
        BackupFolder(path, max_to_keep)  # raises if it is invalid
        super().__init__(path, every, False, asynchronous=asynchronous)
        self.max_to_keep = max_to_keep


def _is_positive(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


class _SavesAfterEpochs(keras.callbacks.Callback):
    def __init__(self, training: Any):
        super().__init__()
        self._training = training
        self._epoch = 0
        self._due = True

    def on_train_begin(self, logs: Any = None) -> None:
        self._training.begin()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        self._training.expect()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._due:
            assert self.model is not None
            ended = bool(self.model.stop_training)
            self._save(self.params["epochs"] if ended else epoch + 1, 0)

    def _save(self, epoch: int, batch: int) -> None:
        assert self.model is not None  # on JAX, this access syncs the variables
        self._training.save(epoch, batch)


class _SavesAfterBatches(_SavesAfterEpochs, LogFreeCallback):
    """Saves every `save_freq` batches, also at the end of an epoch."""

    def __init__(self, training: Any, save_freq: int | str):
        super().__init__(training)
        self._save_freq = save_freq if isinstance(save_freq, int) else math.inf
        self._due = False
        self._since = self._next = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._next = self._training.batch
        super().on_epoch_begin(epoch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._since += batch + 1 - self._next
        self._next = batch + 1
        self._due = self._since >= self._save_freq
        if self._due and not self._is_last_batch():
            self._save(self._epoch, self._next)

    def _is_last_batch(self) -> bool:
        """Return True if `on_epoch_end` is next, which saves if it is due."""
        return self._next >= (self.params.get("steps") or math.inf)

    def _save(self, epoch: int, batch: int) -> None:
        self._since, self._due = 0, False
        super()._save(epoch, batch)


class _SavesBeforePreemption(_SavesAfterBatches):
    """Saves and exits all workers when one gets a termination notice."""

    def __init__(self, training: Any, save_freq: int | str, config: TerminationConfig):
        super().__init__(training, save_freq)
        self._preemption = Preemption(config, training.cluster)
        self._ends = False
        # Context manager in which a termination notice does not end the process.
        self.listening = self._preemption.notice.listening

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch, logs)
        action = self._preemption.after_step()
        if action is NextAction.CONTINUE:
            return
        self._ends = action is NextAction.SAVE_AND_END
        if self._is_last_batch():
            self._due = True
            return
        if self._since:
            self._save(self._epoch, self._next)
        self._end()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not self._ends:
            # The notice may come during evaluation; no batch follows the last epoch.
            action = self._preemption.after_epoch()
            self._ends = action is NextAction.SAVE_AND_END
            self._due = self._due or action is not NextAction.CONTINUE
        self._due = self._due or self._ends or self._save_freq == math.inf
        super().on_epoch_end(epoch, logs)
        self._end()

    def _save(self, epoch: int, batch: int) -> None:
        with self._preemption.saving():
            super()._save(epoch, batch)

    def _end(self) -> None:
        if self._ends:
            self._ends = False
            self._training.wait()
            self._preemption.end()


# Callbacks that only write, so that the chief alone needs them.
_ORBAX_CALLBACKS = tuple(
    filter(None, [getattr(keras.callbacks, "OrbaxCheckpoint", None)])
)
CHIEF_ONLY_CALLBACKS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.ProgbarLogger,
)
# Callbacks that write together or change the training, so that every worker needs them.
SYNCHRONIZED_CALLBACKS = (
    *_ORBAX_CALLBACKS,
    BackupAndRestore,
    _SavesAfterEpochs,
    _SavesAfterBatches,
    _SavesBeforePreemption,
    keras.callbacks.EarlyStopping,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
)
# Callbacks that decide by logs, which are equal on all workers, or decide nothing.
DETERMINISTIC_CALLBACKS = (
    *CHIEF_ONLY_CALLBACKS,
    *SYNCHRONIZED_CALLBACKS,
    keras.callbacks.History,
    keras.callbacks.TerminateOnNaN,
)


class _NoCheckpointer:
    """Stands for the checkpointer of `OrbaxCheckpoint` where another worker writes."""

    def save_checkpointables(self, step: int, payload: Any) -> None:
        """Skip: reading the payload has gathered shards for the chief."""

    def save_checkpointables_async(self, step: int, payload: Any) -> Future:
        done: Future = Future()
        done.set_result(None)
        return done

    wait = close = lambda self: None


def let_chief_write(callbacks: Iterable[Any]) -> None:
    """Keep `OrbaxCheckpoint` of another worker than the chief from writing."""
    # On JAX, where every process writes its shards, Orbax coordinates them.
    if keras.backend.backend() != "jax":
        for callback in callbacks:
            if isinstance(callback, _ORBAX_CALLBACKS):
                callback.checkpointer = _NoCheckpointer()


def given_callbacks(arguments: Mapping[str, Any]) -> list[Any]:
    """Return the callbacks among the arguments of `fit` or the like."""
    given: Any = arguments.get("callbacks")
    is_container = isinstance(given, keras.callbacks.CallbackList)
    return keras.tree.flatten((given.callbacks if is_container else given) or [])


def replace_callbacks(arguments: dict[str, Any], callbacks: list[Any]) -> None:
    given: Any = arguments.get("callbacks")
    if isinstance(given, keras.callbacks.CallbackList):
        given.callbacks = callbacks
        given.set_model(arguments["self"])
    else:
        arguments["callbacks"] = callbacks
