"""What callbacks have counted: it goes on where a training was interrupted.

The loop of `fit` over the batches of an epoch, which begins with any of them.

What a backup of `fit` holds, and how `fit` is brought to where it was.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_strategy.core.registry import get_engine
from keras_strategy.data import random
from keras_strategy.keras_patches import consistency
from keras_strategy.keras_patches.data_adapters import (
    counts_of_arrays,
    engine_orders,
    epoch_of,
    leaving_out,
    set_epoch,
)
from keras_strategy.keras_patches.dataset_state import (
    DataState,
    TfDataState,
    has_state,
    state_of,
    told_by_this_worker,
)
from keras_strategy.keras_patches.patch import home_of, hook
from keras_strategy.keras_patches.saving import SavedVariables, read_by_chief
from keras_strategy.keras_patches.variables_optimizers import variables_of
from keras_strategy.training import ownership
from keras_strategy.training.callbacks import BackupAndRestore
from keras_strategy.training.resume import BackupContents, BackupFolder, decode, encode
from keras_strategy.training.saving import run_on_chief

# What Keras's own callbacks count with. The last two of `ModelCheckpoint` have no
# public name.
_KEPT: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("best", "best_epoch", "stopped_epoch", "wait"),
    keras.callbacks.ReduceLROnPlateau: ("best", "cooldown_counter", "wait"),
    keras.callbacks.ModelCheckpoint: (
        *("best", "epochs_since_last_save"),
        *("_batches_seen_since_last_saving", "_last_batch_seen"),
    ),
}
_WEIGHTS = "best_weights"


class CallbackStates:
    """The callbacks of one `fit` that count.

    They are `EarlyStopping`, `ReduceLROnPlateau` and `ModelCheckpoint`, and what has
    `state_dict()` and `load_state_dict(state)`.

    Args:
        callbacks: All callbacks of the user's.
    """

    def __init__(self, callbacks: Sequence[Any]):
        self._callbacks = [c for c in callbacks if _attributes(c) is not None]

    def read(self) -> tuple[list[Any], dict[str, np.ndarray]]:
        """What a file holds of them: of JSON's values, and arrays by their names."""
        told, arrays = [], {}
        for number, callback in enumerate(self._callbacks):
            names = _attributes(callback)
            if names:
                state = {n: getattr(callback, n) for n in names if hasattr(callback, n)}
            else:
                state = callback.state_dict()
            weights = (names and getattr(callback, _WEIGHTS, None)) or []
            kinds = [[list(w.shape), str(w.dtype)] for w in map(np.asarray, weights)]
            told.append([type(callback).__name__, encode(state), kinds])
            for at, value in enumerate(weights):
                arrays[f"callbacks/{number}/{at}"] = np.asarray(value)
        return told, arrays

    def set(self, told: list[Any], arrays: dict[str, np.ndarray], workers: Any) -> None:
        """Has them go on with what `read` gave; all workers call it.

        Args:
            told: Of JSON's values.
            arrays: The arrays, on the chief.
            workers: What brings tensors from the chief; None for one process.

        Raises:
            ValueError: If these are other callbacks.
        """
        names = [type(callback).__name__ for callback in self._callbacks]
        before = [name for name, *_ in told]
        if names != before:
            raise ValueError(
                "A training goes on with the callbacks that it was interrupted with, "
                f"in the same order: {', '.join(before) or 'none'}. Received: "
                f"{', '.join(names) or 'none'}."
            )
        for number, (callback, one) in enumerate(
            zip(self._callbacks, told, strict=True)
        ):
            _, state, kinds = one
            if not _attributes(callback):
                callback.load_state_dict(decode(state))
                continue
            for name, value in decode(state).items():
                setattr(callback, name, value)
            if kinds:
                weights = [
                    arrays.get(f"callbacks/{number}/{at}", np.zeros(shape, dtype))
                    for at, (shape, dtype) in enumerate(kinds)
                ]
                setattr(callback, _WEIGHTS, _of_chief(weights, workers))


def _of_chief(weights: list[np.ndarray], workers: Any) -> list[np.ndarray]:
    if workers is None:
        return weights
    tensors = [ops.convert_to_tensor(value) for value in weights]
    tensors = workers.broadcast("a backup's best weights", tensors)
    return [np.array(ops.convert_to_numpy(tensor)) for tensor in tensors]


def _attributes(callback: Any) -> tuple[str, ...] | None:
    """What a callback counts with; nothing where it says that itself."""
    if has_state(callback):
        return ()
    for kind, names in _KEPT.items():
        if isinstance(callback, kind):
            return names
    return None


EpochIterator: Any = home_of(
    "EpochIterator", "keras.src.trainers.epoch_iterator"
).EpochIterator


class _Place(threading.local):
    """Who reads the next batches in this thread."""

    expected: "Reading | None" = None


_place = _Place()


def _expected() -> "Reading | None":
    """The `fit` that is about to read an epoch's batches, if it is backed up."""
    return _place.expected


@hook(EpochIterator, "__iter__", "(self)", when=_expected)
def _iter(original, reading, self):
    """An epoch that was interrupted goes on with the batch that came next."""
    _place.expected = None
    reading.begin(self, original)
    return self


def forget() -> None:
    """Nobody is about to read an epoch's batches in this thread."""
    _place.expected = None


@dataclass(frozen=True)
class Position:
    """Where in its data a training is, of JSON's values.

    Attributes:
        batch: The batch of the epoch.
        read: How many batches were read since the data was begun to be read.
        before: The random state before that.
        begun: Whether it was begun to be read, and that was before `before`.
        now: The random state.
        orders: `epoch_of` the data's adapter before that and now.
    """

    batch: int
    read: int
    before: Any
    begun: bool
    now: Any
    orders: Sequence[int | None] = (None, None)


class Reading:
    """What one `fit` reads of its data.

    Args:
        random_state: Gives the state of all random generators.
        set_random_state: Sets it.
        data: Where its data is, if that can say it.

    Attributes:
        iterator: Keras's iterator, once the loop has begun to read.
    """

    def __init__(
        self,
        random_state: Callable[[], Any],
        set_random_state: Callable[[Any], None],
        data: DataState | TfDataState | None = None,
    ):
        self._random_state = random_state
        self._set_random_state = set_random_state
        self.iterator: Any = None
        self._before: Any = None
        self._order: int | None = None
        self._begun = False
        self._resumed: Position | None = None
        self._restore: Callable[[Any], None] | None = None
        self._data, self._told = data, None

    def expect(self) -> None:
        """The loop of this `fit` is the next that begins to read in this thread."""
        _place.expected = self

    def resume(
        self, position: Position, restore: Callable[[Any], None], told: Any
    ) -> None:
        """Has the next epoch go on.

        Args:
            position: Where.
            restore: Called with Keras's iterator before its first batch is read.
            told: What the data has said of itself there; None if it has not.
        """
        self._resumed, self._restore, self._told = position, restore, told

    def position(self, batch: int) -> Position:
        """Where it is, before a batch of the epoch."""
        iterator = self.iterator
        stays = (
            iterator.steps_per_epoch is not None
            and iterator._current_iterator is not None
        )
        read = iterator._steps_seen if batch or stays else 0
        begun = self._begun if read else stays
        orders = self._order, epoch_of(iterator.data_adapter)
        return Position(batch, read, self._before, begun, self._random_state(), orders)

    def told(self, position: Position) -> Any:
        """What the data says of itself, of JSON's values; None if it does not."""
        if self._data is None:
            return None
        return self._data.at(position.read, position.begun)

    def begin(self, iterator: Any, original: Callable[[Any], Any]) -> None:
        """Begins to read an epoch.

        Args:
            iterator: Keras's iterator, which goes on with what it has been reading if
                the steps of an epoch are given.
            original: Its method that begins.
        """
        self.iterator = iterator
        position, self._resumed = self._resumed, None
        if position is not None:
            self._go_on(iterator, original, position)
            return
        stays = (
            iterator.steps_per_epoch is not None
            and iterator._current_iterator is not None
        )
        if not (stays and iterator._steps_seen):
            self._before, self._begun = self._random_state(), stays
            self._order = epoch_of(iterator.data_adapter)
            if self._data is not None:
                self._data.begins(stays)
        original(iterator)

    def _go_on(
        self, iterator: Any, original: Callable[[Any], Any], position: Position
    ) -> None:
        assert self._restore is not None
        self._restore(iterator)
        steps, rest = divmod(position.batch, iterator.steps_per_execution)
        if rest:
            raise ValueError(
                f"The backup was made after {position.batch} batches of an epoch. That "
                "is no multiple of `steps_per_execution`. Received: "
                f"steps_per_execution={iterator.steps_per_execution}"
            )
        self._before, self._begun = position.before, position.begun
        (self._order, order), adapter = position.orders, iterator.data_adapter
        set_epoch(adapter, self._order if position.read else order)
        again = position.read
        if self._data is not None:
            again -= self._data.go_on(self._told)
        if position.read:
            self._set_random_state(position.before)
        if iterator.steps_per_epoch is not None and (position.begun or position.read):
            iterator._current_iterator = iter(iterator._get_iterator())
            if position.begun and position.read:
                self._set_random_state(position.before)
        original(iterator)
        with leaving_out(adapter, again):
            self._read_on(iterator, steps, again)
        iterator._steps_seen = position.read
        set_epoch(adapter, order)
        self._set_random_state(position.now)

    def _read_on(self, iterator: Any, steps: int, count: int) -> None:
        """Reads up to where the epoch goes on."""
        batches = iterator._current_iterator
        for _ in range(steps):
            *_, batches = next(iterator._epoch_iterator)
        for number in range(count):
            if next(batches, None) is None:
                raise ValueError(
                    f"The backup was made after {count} batches of the data, which has "
                    f"{number}. A training goes on with the data that it was "
                    "interrupted with."
                )


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
        self._reading = Reading(random.get_random_state, random.set_random_state, data)
        self._variables = SavedVariables(strategy)
        self._found = read_by_chief(self._cluster, folder)
        self._resumed: BackupContents | None = None
        self.batch = 0
        if self._found is not None:
            random.set_random_state(self._found.facts["begin"])
        elif self._cluster is not None:
            random.sync_with_chief(self._cluster)
        self._begin = random.get_random_state()

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
        random.set_random_state(position.now)

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
            ownership.broadcast_pending_values()
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
            consistency.require_same_values(
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
        run_on_chief(
            self._cluster, "the backup", lambda: self._folder.write(facts, arrays)
        )

    def clear(self) -> None:
        """Removes the backups."""
        run_on_chief(self._cluster, "the removal of the backups", self._folder.clear)

    def agree(self, says: list[bool]) -> list[list[bool]]:
        """What each worker says of what this one says; all of them ask."""
        cluster = self._cluster
        return [says] if cluster is None else cluster.exchange("whether to end", says)


def _is_metrics(key: str) -> bool:
    return key.startswith("metrics/")
