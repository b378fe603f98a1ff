"""What several workers write: once, by the chief, and whole.

All workers run the same program, so all of them save models and make callbacks that
write. The chief writes, under another name first, and the others wait for it.
"""

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_strategy.errors import WorkerFailedError
from keras_strategy.hooks import entry_scope
from keras_strategy.hooks.hook import Hook
from keras_strategy.rules.ownership import strategy_of_model
from keras_strategy.workers.cluster import Cluster

# They write, and nothing that the workers do together depends on them.
_OF_THE_CHIEF = (
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.ProgbarLogger,
)
# They decide by logs, which all workers have, or do not decide anything.
_ALIKE_EVERYWHERE = (
    *_OF_THE_CHIEF,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.EarlyStopping,
    keras.callbacks.History,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
    keras.callbacks.TerminateOnNaN,
)


@contextlib.contextmanager
def saving(cluster: Cluster, filepath: Any, what: str) -> Iterator[str | os.PathLike]:
    """Gives the path to save to, and waits until the chief has.

    All workers save, since saving may read what only all of them can; the files of
    those that are not the chief are thrown away.

    Args:
        cluster: The workers.
        filepath: Where the user wants the file.
        what: What is done, for messages.

    Raises:
        WorkerFailedError: If the chief could not write it.
    """
    path = os.fspath(filepath)
    operation = f"{what} to {os.path.basename(path)}"
    error: Exception | None = None
    with contextlib.ExitStack() as cleaning:
        try:
            if cluster.is_chief:
                with _replaced(path) as temporary:
                    yield temporary
            else:
                folder = cleaning.enter_context(tempfile.TemporaryDirectory())
                yield os.path.join(folder, os.path.basename(path))
        except Exception as caught:
            error = caught
        said = None if error is None else f"{type(error).__name__}: {error}"
        told = cluster.agree(operation, said)
    if error is not None:
        raise error
    for name, problem in zip(cluster.names, told, strict=True):
        if problem is not None:
            raise WorkerFailedError(f"{name} failed in {operation}: {problem}")


@contextlib.contextmanager
def _replaced(path: str) -> Iterator[str]:
    """A path beside another one, which takes its place when all went well."""
    target = pathlib.Path(path)
    if "://" in path:
        # An object store shows a file when it is whole.
        yield path
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    # Keras knows formats by the ends of names, so that the end must stay.
    folder = tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        temporary = os.path.join(folder, target.name)
        yield temporary
        # Weights in several shards are several files.
        for part in os.listdir(folder):
            source, place = os.path.join(folder, part), target.parent / part
            if os.path.isdir(source) and place.is_dir():
                shutil.rmtree(place)
            os.replace(source, place)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def worker_arguments(
    method: str,
    arguments: dict[str, Any],
    cluster: Cluster,
    lead: Callable[[bool], keras.callbacks.Callback],
) -> None:
    """Changes the arguments of `fit` and its like to those of this worker.

    Args:
        method: "fit", "evaluate" or "predict".
        arguments: The arguments by name; changed in place.
        cluster: The workers.
        lead: Makes the callback that keeps the workers together; called with whether
            one of the user's callbacks may decide something by itself.
    """
    if not cluster.is_chief:
        arguments["verbose"] = 0
    callbacks = arguments.get("callbacks")
    given = callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else None
    if given is not None and method != "fit":
        return  # that of `fit`, which validates
    listed = list(keras.tree.flatten(given.callbacks if given else callbacks or []))
    own_minds = not all(type(c) in _ALIKE_EVERYWHERE for c in listed)
    if not cluster.is_chief:
        listed = [
            _of_this_worker(c) for c in listed if not isinstance(c, _OF_THE_CHIEF)
        ]
    if method == "fit":
        listed.append(lead(own_minds))
    if given is None:
        arguments["callbacks"] = listed
        return
    given.callbacks = listed
    given.set_model(arguments["self"])


def _of_this_worker(callback: Any) -> Any:
    if not isinstance(callback, keras.callbacks.BackupAndRestore):
        return callback
    # What the chief restores, the others are given.
    return _OwnBackup(
        tempfile.mkdtemp(prefix="keras_strategy_backup_"),
        save_freq=callback.save_freq,
        double_checkpoint=callback.double_checkpoint,
        delete_checkpoint=True,
    )


class _OwnBackup(keras.callbacks.BackupAndRestore):
    """Takes part in the chief's backups, and keeps none."""

    def on_train_end(self, logs: Any = None) -> None:
        super().on_train_end(logs)
        shutil.rmtree(self.backup_dir, ignore_errors=True)


class ChiefsLead(keras.callbacks.Callback):
    """Has all workers begin as the chief does, and stop when one wants to.

    It comes after the user's callbacks: one of them may have restored the chief's
    variables from a backup that the others cannot see.

    Args:
        cluster: The workers.
        give_variables: Gives all workers the chief's variables of a model.
        epoch: Reads the epoch that a model begins with.
        set_epoch: Sets it.
        every_batch: Whether to ask after each batch who wants to stop; after each
            epoch it is asked in any case.
    """

    def __init__(
        self,
        cluster: Cluster,
        give_variables: Callable[[keras.Model], None],
        epoch: Callable[[keras.Model], int | None],
        set_epoch: Callable[[keras.Model, int | None], None],
        every_batch: bool,
    ):
        super().__init__()
        self._cluster = cluster
        self._give_variables = give_variables
        self._epoch, self._set_epoch = epoch, set_epoch
        self._every_batch = every_batch

    def on_train_begin(self, logs: Any = None) -> None:
        """Takes the chief's variables and first epoch."""
        epochs = self._cluster.agree("the first epoch", self._epoch(self.model))
        self._set_epoch(self.model, epochs[0])
        self._give_variables(self.model)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stops if a worker wants to."""
        if self._every_batch:
            self._agree_to_stop()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stops if a worker wants to."""
        self._agree_to_stop()

    def _agree_to_stop(self) -> None:
        wanted = bool(self.model.stop_training)
        if any(self._cluster.agree("whether to stop", wanted)):
            self.model.stop_training = True


def _save(original: Callable) -> Callable:
    """`Model.save`, `save_weights` and `export`: the chief writes for all workers."""
    name = original.__name__

    def save(self, filepath, *args, **kwargs):
        strategy = strategy_of_model(self)
        cluster = None if strategy is None else strategy.extended.cluster
        if cluster is None:
            return original(self, filepath, *args, **kwargs)
        with saving(cluster, filepath, f"`{name}`") as path:
            return original(self, path, *args, **kwargs)

    return save


def _restore(original: Callable) -> Callable:
    """`BackupAndRestore.on_train_begin`: the chief alone restores.

    The others may not see its folder; they get what it restored when all callbacks
    have begun. To load makes variables and throws them away: they are not everybody's.
    """

    def on_train_begin(self, logs=None):
        strategy = strategy_of_model(self.model)
        cluster = None if strategy is None else strategy.extended.cluster
        if cluster is None:
            return original(self, logs)
        optimizer = self.model.optimizer
        if self.model.built and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        if cluster.is_chief:
            with entry_scope.left_for(None):
                original(self, logs)

    return on_train_begin


def hooks() -> list[Hook]:
    """The hooks by which the chief alone writes and restores."""
    restore = keras.callbacks.BackupAndRestore
    return [
        *(
            Hook(keras.Model, name, ("filepath",), _save)
            for name in ("save", "save_weights", "export")
        ),
        Hook(restore, "on_train_begin", ("logs",), _restore),
    ]
