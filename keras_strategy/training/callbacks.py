"""Callbacks that hook into batches without reading logs.

`BackupAndRestore`: the schedule of backups.

`hooks.backups` defines the content of a backup and restores Keras's loop.

Callbacks with several workers: the chief writes, and all start and stop together.

All workers run the same program, so all of them make callbacks that write, restore and
stop training.
"""

import math
import os
from collections.abc import Callable
from typing import Any, Protocol

import keras

from keras_strategy.cluster.membership import Cluster
from keras_strategy.cluster.preemption import NextAction, Preemption
from keras_strategy.options import TerminationConfig


class LogFreeCallback(keras.callbacks.Callback):
    """Callback that uses the model but not the logs of a batch.

    Keras waits for a step to convert its logs. If all batch callbacks are of this
    class, they get no logs, and nothing waits.
    """


class ResumableFit(Protocol):
    """A `fit` with backups."""

    @property
    def batch(self) -> int:
        """Batch at which the next epoch begins."""
        ...

    def restore(self) -> None:
        """Continue from the last backup, if there is one."""
        ...

    def begin(self) -> None:
        """Handle that all callbacks have begun."""
        ...

    def expect(self) -> None:
        """Handle that the loop reads its batches next."""
        ...

    def save(self, epoch: int, batch: int) -> None:
        """Save a backup from which training continues at this epoch and batch."""
        ...

    def clear(self) -> None:
        """Remove the backups."""
        ...

    def agree(self, says: list[bool]) -> list[list[bool]]:
        """Return every worker's values; a collective call."""
        ...


class BackupAndRestore(keras.callbacks.Callback):
    """Saves all of a training, so that one that is interrupted loses nothing.

    A `fit` that is started again with the same arguments goes on at the batch that came
    next, and ends as if it had not been interrupted: a backup holds the weights, the
    optimizers, the metrics of the running epoch, the states of all random generators,
    the epoch and the batch, and where in the data that is. It can be gone on from on
    another number of replicas or workers, and on another backend.

    The last two backups are kept in the folder. Each is written whole or not at all; of
    one that is damaged the name is logged, and the one before it is used. Of several
    workers the chief alone writes and reads them.

    A `keras.callbacks.BackupAndRestore` does the same on a model of a strategy of
    several replicas.

    Args:
        backup_dir: The folder, for this `fit` alone.
        save_freq: "epoch", to save at the end of each, or after how many batches.
        delete_checkpoint: Whether the backups are removed when training has ended.
        save_before_preemption: Whether a SIGTERM to any worker, as a scheduler sends it
            to take a machine away, has all of them save after the batch that they are
            in, and end with the exit code 75. The workers ask each other after every
            batch and epoch. An `experimental.TerminationConfig` says by what else they
            learn it, how long they have, and how they end.

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
    ):
        super().__init__()
        if not os.fspath(backup_dir) or "://" in os.fspath(backup_dir):
            raise ValueError(
                "`backup_dir` must be a folder of the file system. Received: "
                f"{backup_dir!r}"
            )
        every = isinstance(save_freq, int) and save_freq is not True and save_freq > 0
        if save_freq != "epoch" and not every:
            raise ValueError(
                "`save_freq` must be 'epoch' or a number of batches, 1 or more. "
                f"Received: {save_freq!r}"
            )
        config = save_before_preemption
        if isinstance(config, TerminationConfig) and config.save_fn is not None:
            raise ValueError(
                "BackupAndRestore saves by itself: a TerminationConfig with a "
                "`save_fn` is for `experimental.PreemptionCheckpointHandler`."
            )
        self.backup_dir = backup_dir
        self.save_freq = save_freq
        self.delete_checkpoint = delete_checkpoint
        self.save_before_preemption = save_before_preemption
        self._training: ResumableFit | None = None

    def attach(self, training: ResumableFit | None) -> None:
        """Set the `fit` in which this callback is called."""
        self._training = training

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore the last backup."""
        if self._training is None:
            raise RuntimeError(
                "`keras_strategy.callbacks.BackupAndRestore` saves models that were "
                "made in the scope of a strategy, with `fit`. Make the model inside "
                "`with strategy.scope():`, of a `OneDeviceStrategy` for one device."
            )
        self._training.restore()

    def on_train_end(self, logs: Any = None) -> None:
        """Remove the backups if `delete_checkpoint` is set."""
        if self.delete_checkpoint and self._training is not None:
            self._training.clear()

    def saver(self, training: ResumableFit) -> keras.callbacks.Callback:
        """Return the callback that saves, to run after all others."""
        config = self.save_before_preemption
        if config:
            if not isinstance(config, TerminationConfig):
                config = TerminationConfig()
            return _SavesBeforePreemption(training, self.save_freq, config)
        if isinstance(self.save_freq, int):
            return _SavesAfterBatches(training, self.save_freq)
        return _SavesAfterEpochs(training)


class _SavesAfterEpochs(keras.callbacks.Callback):
    """Saves at the end of each epoch, after all other callbacks."""

    def __init__(self, training: ResumableFit):
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
        assert self.model is not None  # on JAX this gives the variables their values
        self._training.save(epoch, batch)


class _SavesAfterBatches(_SavesAfterEpochs, LogFreeCallback):
    """Saves every `save_freq` batches, also at the end of an epoch."""

    def __init__(self, training: ResumableFit, save_freq: int | str):
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
        # After its last batch an epoch has its end before it, which takes a batch.
        if self._due and self._next < (self.params.get("steps") or float("inf")):
            self._save(self._epoch, self._next)

    def _save(self, epoch: int, batch: int) -> None:
        self._since, self._due = 0, False
        super()._save(epoch, batch)


class _SavesBeforePreemption(_SavesAfterBatches):
    """Saves and exits all workers when one gets a termination notice."""

    def __init__(
        self, training: ResumableFit, save_freq: int | str, config: TerminationConfig
    ):
        super().__init__(training, save_freq)
        self._preemption = Preemption(config, training.agree)
        self._ends = False
        # Surrounds what a notice does not end at once.
        self.listening = self._preemption.notice.listening

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch, logs)
        what = self._preemption.after_step()
        if what is NextAction.CONTINUE:
            return
        self._ends = what is NextAction.SAVE_AND_END
        if self._next >= (self.params.get("steps") or float("inf")):
            self._due = True  # at the end of the epoch
            return
        if self._since:
            self._save(self._epoch, self._next)
        self._end()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not self._ends:
            # Who was asked while they evaluate: after the last epoch comes no batch.
            what = self._preemption.after_epoch()
            self._ends = what is NextAction.SAVE_AND_END
            self._due = self._due or what is not NextAction.CONTINUE
        self._due = self._due or self._ends or self._save_freq == math.inf
        super().on_epoch_end(epoch, logs)
        self._end()

    def _save(self, epoch: int, batch: int) -> None:
        with self._preemption.saving():
            super()._save(epoch, batch)

    def _end(self) -> None:
        if self._ends:
            self._ends = False
            self._preemption.end()


BACKUP_CALLBACKS = (
    BackupAndRestore,
    _SavesAfterEpochs,
    _SavesAfterBatches,
    _SavesBeforePreemption,
)
"""What acts alike on all workers."""


# They write, and nothing that the workers do together depends on them.
_OF_THE_CHIEF = (
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.ProgbarLogger,
)
# They write together, or change what is trained: they must be on every worker.
SYNCHRONIZED_CALLBACKS = (
    *BACKUP_CALLBACKS,
    keras.callbacks.EarlyStopping,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
)
# They decide by logs, which all workers have, or do not decide anything.
_ALIKE_EVERYWHERE = (
    *_OF_THE_CHIEF,
    *SYNCHRONIZED_CALLBACKS,
    keras.callbacks.History,
    keras.callbacks.TerminateOnNaN,
)


def prepare_fit_arguments(
    method: str,
    arguments: dict[str, Any],
    cluster: Cluster,
    lead: Callable[[list[Any], bool], keras.callbacks.Callback],
) -> None:
    """Adapt the arguments of `fit` and the like to this worker, in place.

    `lead` makes the callback that keeps the workers in step, from the callbacks that
    every worker must have and whether another one may decide by local data.
    """
    if not cluster.is_chief:
        arguments["verbose"] = 0
    callbacks = arguments.get("callbacks")
    given = callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else None
    if given is not None and method != "fit":
        return  # that of `fit`, which validates
    listed = list(keras.tree.flatten(given.callbacks if given else callbacks or []))
    own_minds = not all(type(c) in _ALIKE_EVERYWHERE for c in listed)
    in_step = [c for c in listed if isinstance(c, SYNCHRONIZED_CALLBACKS)]
    cluster.client.notes["callbacks"] = ", ".join(type(c).__name__ for c in listed)
    if not cluster.is_chief:
        listed = [c for c in listed if not isinstance(c, _OF_THE_CHIEF)]
    if method == "fit":
        listed.append(lead(in_step, own_minds))
    if given is None:
        arguments["callbacks"] = listed
        return
    given.callbacks = listed
    given.set_model(arguments["self"])


class SyncTrainingState(keras.callbacks.Callback):
    """Starts all workers from the chief's state, and stops them together.

    It runs after the user's callbacks, as one of them may restore the chief's variables
    from a backup that other workers cannot read.
    """

    def __init__(
        self,
        cluster: Cluster,
        give_variables: Callable[[keras.Model], None],
        epoch: Callable[[keras.Model], int | None],
        set_epoch: Callable[[keras.Model, int | None], None],
        require_same_values: Callable[[keras.Model, Any], list[Any]],
    ):
        super().__init__()
        self._cluster = cluster
        self._give_variables = give_variables
        self._epoch, self._set_epoch = epoch, set_epoch
        self._require_same_values = require_same_values

    def on_train_begin(self, logs: Any = None) -> None:
        """Take the chief's variables and initial epoch."""
        epochs = self._cluster.exchange("the first epoch", self._epoch(self.model))
        self._set_epoch(self.model, epochs[0])
        self._give_variables(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Check that all workers hold equal values; stop if one wants to."""
        wanted = bool(self.model.stop_training)
        if any(self._require_same_values(self.model, wanted)):
            self.model.stop_training = True


class SyncTrainingStatePerBatch(SyncTrainingState, LogFreeCallback):
    """Checks after each batch, too, whether a worker wants to stop.

    It is a class of its own because Keras skips batch hooks that no callback overrides.
    """

    def set_model(self, model: keras.Model) -> None:
        """Keep the model; `self.model` would sync all variables on JAX."""
        super().set_model(model)
        self._asked = model

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stop if a worker wants to."""
        wanted = bool(self._asked.stop_training)
        if any(self._cluster.exchange("whether to stop", wanted)):
            self._asked.stop_training = True
