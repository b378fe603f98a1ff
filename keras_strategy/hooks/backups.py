"""What a backup of `fit` holds, and how `fit` is brought to where it was."""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import keras

from keras_strategy.core.registry import get_engine
from keras_strategy.hooks import drift
from keras_strategy.hooks.array_rows import epoch_of
from keras_strategy.hooks.callback_states import CallbackStates
from keras_strategy.hooks.data_adapters import counts_of_arrays, engine_orders
from keras_strategy.hooks.data_states import (
    DataState,
    TfDataState,
    state_of,
    told_by_this_worker,
)
from keras_strategy.hooks.epochs import Position, Reading, forget
from keras_strategy.hooks.saved_variables import SavedVariables, read_by_chief
from keras_strategy.hooks.variables import variables_of
from keras_strategy.input import seeds
from keras_strategy.rules import first_values
from keras_strategy.rules.backup_files import BackupFolder, BackupContents
from keras_strategy.rules.backups import BackupAndRestore
from keras_strategy.rules.one_writer import run_on_chief

_KERAS = keras.callbacks.BackupAndRestore


@contextlib.contextmanager
def backed_up(
    strategy: Any, model: keras.Model, arguments: dict[str, Any]
) -> Iterator[None]:
    """Surrounds a `fit`, and goes on from its backup if there is one.

    Args:
        strategy: The strategy of the model.
        model: The model.
        arguments: The arguments of `fit` by name; changed in place.
    """
    callbacks = arguments.get("callbacks")
    given = callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else None
    listed = list(keras.tree.flatten(given.callbacks if given else callbacks or []))
    if strategy.num_replicas_in_sync > 1:
        listed = [_in_place_of(c) if type(c) is _KERAS else c for c in listed]
    others = [type(c).__name__ for c in listed if isinstance(c, _KERAS)]
    if others and strategy.extended.cluster is not None:
        raise ValueError(
            "Of several workers the chief alone writes backups, for which callbacks of "
            "one's own derive from `keras_strategy.callbacks.BackupAndRestore`. "
            f"Received: {', '.join(others)}, which derives from Keras's."
        )
    found = [c for c in listed if isinstance(c, BackupAndRestore)]
    if not found:
        yield
        return
    if len(found) > 1:
        raise ValueError(
            f"`fit` takes one BackupAndRestore. Received: {len(found)} of them."
        )
    (backup,) = found
    # After an epoch nobody asks where in it the data is.
    each_batch = backup.save_freq != "epoch" or bool(backup.save_before_preemption)
    data = state_of(arguments.get("x"), each_batch)
    folder = BackupFolder(backup.backup_dir)
    states = CallbackStates(listed)
    training = _Training(strategy, model, folder, data, states)
    saver = backup.saver(training)
    listed.append(saver)
    if given is None:
        arguments["callbacks"] = listed
    else:
        given.callbacks = listed
        given.set_model(model)
    backup.attach(training)
    listening = getattr(saver, "listening", contextlib.nullcontext)
    try:
        with listening(), contextlib.nullcontext() if data is None else data.watched():
            yield
    finally:
        backup.attach(None)
        forget()
        model._initial_epoch = None  # or the next `fit` would begin there


def _in_place_of(callback: Any) -> BackupAndRestore:
    return BackupAndRestore(
        callback.backup_dir, callback.save_freq, callback.delete_checkpoint
    )


class _Training:
    """A `fit` that is backed up; see `rules.backups.Training`.

    Made before `fit` begins, since what the engine shuffles arrays with is settled when
    they become a dataset.

    Args:
        strategy: The strategy of the model.
        model: The model.
        folder: Where the backups are.
        data: Where its data is, if that can say it.
        callbacks: The user's that count.
    """

    def __init__(
        self,
        strategy: Any,
        model: keras.Model,
        folder: BackupFolder,
        data: DataState | TfDataState | None,
        callbacks: CallbackStates,
    ):
        self._strategy, self._model, self._folder = strategy, model, folder
        self._callbacks = callbacks
        self._cluster, self._data = strategy.extended.cluster, data
        self._reading = Reading(seeds.get_random_state, seeds.set_random_state, data)
        self._variables = SavedVariables(strategy)
        self._found = read_by_chief(self._cluster, folder)
        self._resumed: BackupContents | None = None
        self.batch = 0
        if self._found is not None:
            seeds.set_random_state(self._found.facts["begin"])
        elif self._cluster is not None:
            seeds.sync_with_chief(self._cluster)
        self._begin = seeds.get_random_state()

    def restore(self) -> None:
        """Has the training go on where the backup was made, if there is one."""
        found, self._found = self._found, None
        if found is None:
            return
        position = Position(**found.facts["position"])
        self._model._initial_epoch = found.facts["epoch"]
        self.batch = position.batch
        self._build()
        self._variables.assign(found, variables_of(self._model, False), _is_metrics)
        seeds.set_random_state(position.now)

        def again(iterator):
            adapter, before = iterator.data_adapter, found.facts["engine"]
            counts = counts_of_arrays(adapter)
            others = before != get_engine().name
            others |= (position.orders[1] is None) != (epoch_of(adapter) is None)
            if position.read and others and engine_orders(adapter):
                raise ValueError(
                    f"{found.file} was made in the middle of an epoch of shuffled "
                    f"rows, whose order {before} has drawn. Go on with that backend "
                    "and version of Keras, or shuffle a PyDataset, whose order is the "
                    "same on every backend."
                )
            if position.read and counts != found.facts["counts"]:
                raise ValueError(
                    "A training goes on in the middle of an epoch with the data that "
                    "it was interrupted with. Received batches, rows of a batch and of "
                    f"the last: {counts}, where {found.file} was made with "
                    f"{found.facts['counts']}."
                )
            if position.batch:
                # What callbacks do at the beginning of an epoch has been done.
                self._build(iterator)
                self._variables.assign(found, variables_of(self._model))

        told = told_by_this_worker(found.facts["data"], self._cluster)
        alone = len(found.facts["data"]) == 1, self._cluster is None
        other = found.facts["engine"] != get_engine().name or len(set(alone)) > 1
        if other and told is not None and isinstance(self._data, TfDataState):
            self._data.read_otherwise()
        self._reading.resume(position, again, told)
        self._resumed = found

    def begin(self) -> None:
        """Has callbacks, which have begun anew, go on counting."""
        found, self._resumed = self._resumed, None
        if found is not None:
            workers = self._strategy.extended.group.workers
            self._callbacks.set(found.facts["callbacks"], found.arrays, workers)

    def _build(self, iterator: Any = None) -> None:
        model = self._model
        if not model.built:
            raise ValueError(
                f"The model '{model.name}' goes on from a backup, for which its "
                "variables must be there before `fit`. Call it on a batch, or make it "
                "with the shape of its inputs."
            )
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
            first_values.broadcast_pending_values()
        metrics = getattr(model, "_compile_metrics", None)
        if iterator is not None and metrics is not None and not metrics.built:
            model._symbolic_build(iterator=iterator)
            iterator.reset()

    def expect(self) -> None:
        """Is told that the loop reads its batches next."""
        self.batch = 0
        self._reading.expect()

    def save(self, epoch: int, batch: int) -> None:
        """Makes a backup."""
        if self._cluster is not None:
            drift.require_same_values(
                self._strategy, self._model, operation="the backup"
            )
        position = self._reading.position(batch)
        iterator = self._reading.iterator
        told = [self._reading.told(position)]
        if self._cluster is not None and self._data is not None:
            told = self._cluster.exchange("where the data is", told[0])
        variables = variables_of(self._model, metrics=batch > 0)
        facts, arrays = self._variables.read(variables, self._folder.spill)
        counted, held = self._callbacks.read()
        arrays |= held
        facts |= {
            "callbacks": counted,
            "epoch": epoch,
            "engine": get_engine().name,
            "position": asdict(position),
            "data": told,
            "begin": self._begin,
            "counts": counts_of_arrays(iterator.data_adapter),
        }
        run_on_chief(self._cluster, "the backup", lambda: self._folder.write(facts, arrays))

    def clear(self) -> None:
        """Removes the backups."""
        run_on_chief(self._cluster, "the removal of the backups", self._folder.clear)

    def agree(self, says: list[bool]) -> list[list[bool]]:
        """What each worker says of what this one says; all of them ask."""
        cluster = self._cluster
        return [says] if cluster is None else cluster.exchange("whether to end", says)


def _is_metrics(key: str) -> bool:
    return key.startswith("metrics/")
