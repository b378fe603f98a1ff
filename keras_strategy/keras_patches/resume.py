"""Backup and resume of `fit`, also within an epoch, with the counters of callbacks.

`back_up_fit` finds BackupAndRestore among the callbacks. `EpochReader` tracks what
Keras's epoch iterator reads, so that a resumed `fit` continues with the next batch.
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
    array_batch_counts,
    backend_shuffles,
    epoch_of,
    set_epoch,
    skip_batches,
)
from keras_strategy.keras_patches.dataset_state import (
    DataState,
    TfDataState,
    dataset_state_of,
    has_state_dict,
    state_of_this_worker,
)
from keras_strategy.keras_patches.patch import find_module, hook
from keras_strategy.keras_patches.saving import SavedVariables, read_on_chief
from keras_strategy.keras_patches.variables_optimizers import variables_of
from keras_strategy.training import ownership
from keras_strategy.training.callbacks import BackupAndRestore
from keras_strategy.training.resume import BackupContents, BackupFolder, decode, encode
from keras_strategy.training.saving import run_on_chief

# The counters of Keras's callbacks. The last two of `ModelCheckpoint` are private.
_COUNTERS: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("best", "best_epoch", "stopped_epoch", "wait"),
    keras.callbacks.ReduceLROnPlateau: ("best", "cooldown_counter", "wait"),
    keras.callbacks.ModelCheckpoint: (
        *("best", "epochs_since_last_save"),
        *("_batches_seen_since_last_saving", "_last_batch_seen"),
    ),
}
_BEST_WEIGHTS = "best_weights"


class CallbackStates:
    """State of the callbacks of one `fit` that count.

    These are `EarlyStopping`, `ReduceLROnPlateau`, `ModelCheckpoint`, and those with
    `state_dict()` and `load_state_dict(state)`.
    """

    def __init__(self, callbacks: Sequence[Any]):
        self._callbacks = [c for c in callbacks if _counter_names(c) is not None]

    def read(self) -> tuple[list[Any], dict[str, np.ndarray]]:
        """Return the states as JSON values, and arrays by name."""
        states, arrays = [], {}
        for number, callback in enumerate(self._callbacks):
            names = _counter_names(callback)
            if names:
                state = {n: getattr(callback, n) for n in names if hasattr(callback, n)}
            else:
                state = callback.state_dict()
            weights = (names and getattr(callback, _BEST_WEIGHTS, None)) or []
            specs = [[list(w.shape), str(w.dtype)] for w in map(np.asarray, weights)]
            states.append([type(callback).__name__, encode(state), specs])
            for index, value in enumerate(weights):
                arrays[f"callbacks/{number}/{index}"] = np.asarray(value)
        return states, arrays

    def set(
        self, states: list[Any], arrays: dict[str, np.ndarray], workers: Any
    ) -> None:
        """Restore what `read` returned; all workers call it.

        Raises:
            ValueError: If the callbacks differ.
        """
        names = [type(callback).__name__ for callback in self._callbacks]
        before = [name for name, *_ in states]
        if names != before:
            raise ValueError(
                "The training must resume with the callbacks of the interrupted run, "
                f"in the same order: {', '.join(before) or 'none'}. Received: "
                f"{', '.join(names) or 'none'}."
            )
        for number, (callback, saved_state) in enumerate(
            zip(self._callbacks, states, strict=True)
        ):
            _, state, specs = saved_state
            if not _counter_names(callback):
                callback.load_state_dict(decode(state))
                continue
            for name, value in decode(state).items():
                setattr(callback, name, value)
            if specs:
                weights = [
                    arrays.get(f"callbacks/{number}/{index}", np.zeros(shape, dtype))
                    for index, (shape, dtype) in enumerate(specs)
                ]
                setattr(callback, _BEST_WEIGHTS, _broadcast_weights(weights, workers))


def _broadcast_weights(weights: list[np.ndarray], workers: Any) -> list[np.ndarray]:
    if workers is None:
        return weights
    tensors = [ops.convert_to_tensor(value) for value in weights]
    tensors = workers.broadcast("a backup's best weights", tensors)
    return [np.array(ops.convert_to_numpy(tensor)) for tensor in tensors]


def _counter_names(callback: Any) -> tuple[str, ...] | None:
    """Return the attributes a callback counts with; none if it is stateful itself."""
    if has_state_dict(callback):
        return ()
    for kind, names in _COUNTERS.items():
        if isinstance(callback, kind):
            return names
    return None


EpochIterator: Any = find_module(
    "EpochIterator", "keras.src.trainers.epoch_iterator"
).EpochIterator


class _ThreadState(threading.local):
    """The reader of the next batches in this thread."""

    expected: "EpochReader | None" = None


_thread_state = _ThreadState()


def _expected_reader() -> "EpochReader | None":
    """Return the backed-up `fit` that is about to read an epoch's batches, or None."""
    return _thread_state.expected


@hook(EpochIterator, "__iter__", "(self)", when=_expected_reader)
def _iter(original, reader, self):
    """Continue an interrupted epoch with its next batch."""
    _thread_state.expected = None
    reader.start_epoch(self, original)
    return self


def forget_reader() -> None:
    """Reset the expected `fit` of this thread."""
    _thread_state.expected = None


@dataclass(frozen=True)
class Position:
    """Position of a training in its data, as JSON values.

    Attributes:
        batch: The batch of the epoch.
        read: The number of batches read since the pass over the data started.
        before: The random state at that start.
        begun: True if the pass started before `before`.
        now: The random state.
        orders: `epoch_of` the data's adapter at that start and now.
    """

    batch: int
    read: int
    before: Any
    begun: bool
    now: Any
    orders: Sequence[int | None] = (None, None)


def _continues_pass(iterator: Any) -> bool:
    """Return True if the next epoch continues the pass of the last one."""
    return (
        iterator.steps_per_epoch is not None and iterator._current_iterator is not None
    )


class EpochReader:
    """Tracks what one `fit` reads of its data.

    Args:
        random_state: Returns the state of all random generators.
        set_random_state: Restores it.
        data: The state of its data, if any.

    Attributes:
        iterator: Keras's iterator, once the loop reads.
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
        self._data, self._saved_state = data, None

    def expect(self) -> None:
        """Expect this `fit` to be the next that reads in this thread."""
        _thread_state.expected = self

    def resume(
        self, position: Position, restore: Callable[[Any], None], dataset_state: Any
    ) -> None:
        """Make the next epoch continue at a position.

        `restore` is called with Keras's iterator before its first batch is read.
        """
        self._resumed, self._restore = position, restore
        self._saved_state = dataset_state

    def position(self, batch: int) -> Position:
        """Return the position before a batch of the epoch."""
        iterator = self.iterator
        continues = _continues_pass(iterator)
        read = iterator._steps_seen if batch or continues else 0
        begun = self._begun if read else continues
        orders = self._order, epoch_of(iterator.data_adapter)
        return Position(batch, read, self._before, begun, self._random_state(), orders)

    def dataset_state(self, position: Position) -> Any:
        """Return the dataset state at a position, or None."""
        if self._data is None:
            return None
        return self._data.state_at(position.read, position.begun)

    def start_epoch(self, iterator: Any, original: Callable[[Any], Any]) -> None:
        """Start an epoch.

        Args:
            iterator: Keras's iterator; continues a pass if `steps_per_epoch` is set.
            original: Its method that starts a pass.
        """
        self.iterator = iterator
        position, self._resumed = self._resumed, None
        if position is not None:
            self._continue_epoch(iterator, original, position)
            return
        continues = _continues_pass(iterator)
        if not (continues and iterator._steps_seen):
            self._before, self._begun = self._random_state(), continues
            self._order = epoch_of(iterator.data_adapter)
            if self._data is not None:
                self._data.start_pass(continues)
        original(iterator)

    def _continue_epoch(
        self, iterator: Any, original: Callable[[Any], Any], position: Position
    ) -> None:
        assert self._restore is not None
        self._restore(iterator)
        steps, rest = divmod(position.batch, iterator.steps_per_execution)
        if rest:
            raise ValueError(
                f"The backup was written after {position.batch} batches of an epoch, "
                "which must be a multiple of `steps_per_execution`. Received: "
                f"steps_per_execution={iterator.steps_per_execution}"
            )
        self._before, self._begun = position.before, position.begun
        (self._order, order), adapter = position.orders, iterator.data_adapter
        set_epoch(adapter, self._order if position.read else order)
        to_read = position.read
        if self._data is not None:
            to_read -= self._data.restore(self._saved_state)
        if position.read:
            self._set_random_state(position.before)
        if iterator.steps_per_epoch is not None and (position.begun or position.read):
            iterator._current_iterator = iter(iterator._get_iterator())
            if position.begun and position.read:
                self._set_random_state(position.before)
        original(iterator)
        with skip_batches(adapter, to_read):
            self._read_up_to(iterator, steps, to_read)
        iterator._steps_seen = position.read
        set_epoch(adapter, order)
        self._set_random_state(position.now)

    def _read_up_to(self, iterator: Any, steps: int, count: int) -> None:
        """Read up to the batch where the epoch continues."""
        batches = iterator._current_iterator
        for _ in range(steps):
            *_, batches = next(iterator._epoch_iterator)
        for number in range(count):
            if next(batches, None) is None:
                raise ValueError(
                    f"The backup was written after {count} batches of the data, which "
                    f"now has {number}. The training must resume with the data of the "
                    "interrupted run."
                )


_KERAS = keras.callbacks.BackupAndRestore


@contextlib.contextmanager
def back_up_fit(
    strategy: Any, model: keras.Model, arguments: dict[str, Any]
) -> Iterator[None]:
    """Context manager for a `fit` with backups that resumes from one if it exists.

    It changes `arguments`, the arguments of `fit` by name, in place.
    """
    callbacks: Any = arguments.get("callbacks")
    callback_list: Any = None
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callback_list, callbacks = callbacks, callbacks.callbacks
    callbacks = list(keras.tree.flatten(callbacks or []))
    if strategy.num_replicas_in_sync > 1:
        callbacks = [
            _replace_callback(c) if type(c) is _KERAS else c for c in callbacks
        ]
    others = [type(c).__name__ for c in callbacks if isinstance(c, _KERAS)]
    if others and strategy.extended.cluster is not None:
        raise ValueError(
            "With several workers only the chief writes backups, so your callbacks "
            "must derive from `keras_strategy.callbacks.BackupAndRestore`. "
            f"Received: {', '.join(others)}, which derives from Keras's."
        )
    found = [c for c in callbacks if isinstance(c, BackupAndRestore)]
    if not found:
        yield
        return
    if len(found) > 1:
        raise ValueError(
            f"`fit` accepts one BackupAndRestore. Received: {len(found)} of them."
        )
    (backup,) = found
    # Backups at the end of an epoch need no state within it.
    each_batch = backup.save_freq != "epoch" or bool(backup.save_before_preemption)
    data = dataset_state_of(arguments.get("x"), each_batch)
    folder = BackupFolder(backup.backup_dir)
    states = CallbackStates(callbacks)
    training = _Fit(strategy, model, folder, data, states)
    saver = backup.saver(training)
    callbacks.append(saver)
    if callback_list is None:
        arguments["callbacks"] = callbacks
    else:
        callback_list.callbacks = callbacks
        callback_list.set_model(model)
    backup.attach(training)
    listening = getattr(saver, "listening", contextlib.nullcontext)
    try:
        with (
            listening(),
            contextlib.nullcontext() if data is None else data.recording(),
        ):
            yield
    finally:
        backup.attach(None)
        forget_reader()
        model._initial_epoch = None  # or the next `fit` would start there


def _replace_callback(callback: Any) -> BackupAndRestore:
    return BackupAndRestore(
        callback.backup_dir, callback.save_freq, callback.delete_checkpoint
    )


class _Fit:
    """A `fit` with backups; see `training.callbacks.ResumableFit`.

    It is created before `fit` starts, because the backend's shuffle seed is fixed when
    arrays become a dataset.
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
        self._reader = EpochReader(
            random.get_random_state, random.set_random_state, data
        )
        self._variables = SavedVariables(strategy)
        self._found = read_on_chief(self._cluster, folder)
        self._resumed: BackupContents | None = None
        self.batch = 0
        if self._found is not None:
            random.set_random_state(self._found.facts["begin"])
        elif self._cluster is not None:
            random.sync_with_chief(self._cluster)
        self._begin = random.get_random_state()

    def restore(self) -> None:
        """Make `fit` continue where the backup was written, if there is one."""
        found, self._found = self._found, None
        if found is None:
            return
        position = Position(**found.facts["position"])
        self._model._initial_epoch = found.facts["epoch"]
        self.batch = position.batch
        self._build()
        self._variables.assign(found, variables_of(self._model, False), _is_metrics)
        random.set_random_state(position.now)

        def check_and_assign(iterator):
            adapter, before = iterator.data_adapter, found.facts["engine"]
            counts = array_batch_counts(adapter)
            others = before != get_engine().name
            others |= (position.orders[1] is None) != (epoch_of(adapter) is None)
            if position.read and others and backend_shuffles(adapter):
                raise ValueError(
                    f"{found.file} was written within an epoch of shuffled rows, whose "
                    f"order {before} has drawn. Resume with that backend and version "
                    "of Keras, or shuffle a PyDataset, whose order is the same on "
                    "every backend."
                )
            if position.read and counts != found.facts["counts"]:
                raise ValueError(
                    "The training must resume within an epoch with the data of the "
                    "interrupted run. Received: batches, rows per batch and rows of "
                    f"the last batch: {counts}, but {found.file} was written with "
                    f"{found.facts['counts']}."
                )
            if position.batch:
                # Callbacks have already handled the start of the epoch.
                self._build(iterator)
                self._variables.assign(found, variables_of(self._model))

        state = state_of_this_worker(found.facts["data"], self._cluster)
        alone = len(found.facts["data"]) == 1, self._cluster is None
        other = found.facts["engine"] != get_engine().name or len(set(alone)) > 1
        if other and state is not None and isinstance(self._data, TfDataState):
            self._data.warn_other_reads()
        self._reader.resume(position, check_and_assign, state)
        self._resumed = found

    def begin(self) -> None:
        """Restore the counters of callbacks, which have been reset."""
        found, self._resumed = self._resumed, None
        if found is not None:
            workers = self._strategy.extended.group.workers
            self._callbacks.set(found.facts["callbacks"], found.arrays, workers)

    def _build(self, iterator: Any = None) -> None:
        model = self._model
        if not model.built:
            raise ValueError(
                f"The model '{model.name}' resumes from a backup, so its variables "
                "must exist before `fit`. Call it on a batch, or create it with the "
                "shape of its inputs."
            )
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
            ownership.broadcast_pending_values()
        metrics = getattr(model, "_compile_metrics", None)
        if iterator is not None and metrics is not None and not metrics.built:
            model._symbolic_build(iterator=iterator)
            iterator.reset()

    def expect(self) -> None:
        """Expect the loop to read its batches next."""
        self.batch = 0
        self._reader.expect()

    def save(self, epoch: int, batch: int) -> None:
        """Write a backup."""
        if self._cluster is not None:
            consistency.check_same_values(
                self._strategy, self._model, operation="the backup"
            )
        position = self._reader.position(batch)
        iterator = self._reader.iterator
        states = [self._reader.dataset_state(position)]
        if self._cluster is not None and self._data is not None:
            states = self._cluster.exchange("the dataset state", states[0])
        variables = variables_of(self._model, metrics=batch > 0)
        facts, arrays = self._variables.read(variables, self._folder.spill)
        counters, best_weights = self._callbacks.read()
        arrays |= best_weights
        facts |= {
            "callbacks": counters,
            "epoch": epoch,
            "engine": get_engine().name,
            "position": asdict(position),
            "data": states,
            "begin": self._begin,
            "counts": array_batch_counts(iterator.data_adapter),
        }
        run_on_chief(
            self._cluster, "the backup", lambda: self._folder.write(facts, arrays)
        )

    def clear(self) -> None:
        """Remove the backups."""
        run_on_chief(self._cluster, "the removal of the backups", self._folder.clear)

    def agree(self, says: list[bool]) -> list[list[bool]]:
        """Return what each worker passes; all of them call it."""
        cluster = self._cluster
        return [says] if cluster is None else cluster.exchange("whether to end", says)


def _is_metrics(key: str) -> bool:
    return key.startswith("metrics/")
