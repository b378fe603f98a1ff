"""Backup and resume of `fit`, also within an epoch, with the counters of callbacks.

`back_up_fit` finds BackupAndRestore among the callbacks. `ResumableFit` tracks what
Keras's epoch iterator reads, so that a resumed `fit` continues with the next batch.
"""

import contextlib
import functools
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_strategy.core.context import get_strategy
from keras_strategy.core.protocols import Strategy
from keras_strategy.core.registry import get_engine
from keras_strategy.data.sources.iterable import FitState, has_state_dict
from keras_strategy.data.sources.kinds import find_source
from keras_strategy.keras_patches import consistency, data_adapters, saving
from keras_strategy.keras_patches.fingerprint import fingerprint, fingerprint_of_arrays
from keras_strategy.keras_patches.patch import find_module, hook
from keras_strategy.keras_patches.variables_optimizers import variables_of
from keras_strategy.training import ownership, resume
from keras_strategy.training.callbacks import (
    BackupAndRestore,
    given_callbacks,
    replace_callbacks,
)
from keras_strategy.training.checkpoint import BackupContents, BackupFolder
from keras_strategy.training.resume import decode, encode
from keras_strategy.training.row_weights import kinds_that_run_whole
from keras_strategy.training.saving import run_on_chief
from keras_strategy.training.sharding import is_sharded

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


def _counter_names(callback: Any) -> tuple[str, ...] | None:
    """Return the attributes a callback counts with; none if it is stateful itself."""
    if has_state_dict(callback):
        return ()
    for kind, names in _COUNTERS.items():
        if isinstance(callback, kind):
            return names
    return None


def _read_callbacks(callbacks: list[Any]) -> tuple[list[Any], dict[str, np.ndarray]]:
    """Return the states of callbacks as JSON values, and arrays by name."""
    states, arrays = [], {}
    for number, callback in enumerate(callbacks):
        names = _counter_names(callback)
        if names:
            state = {n: getattr(callback, n) for n in names if hasattr(callback, n)}
        else:
            state = callback.state_dict()
        weights = (names and getattr(callback, _BEST_WEIGHTS, None)) or []
        weights = [np.asarray(value) for value in weights]
        specs = [[list(value.shape), str(value.dtype)] for value in weights]
        states.append([type(callback).__name__, encode(state), specs])
        for index, value in enumerate(weights):
            arrays[f"callbacks/{number}/{index}"] = value
    return states, arrays


def _restore_callbacks(
    callbacks: list[Any],
    states: list[Any],
    arrays: Mapping[str, np.ndarray],
    workers: Any,
) -> None:
    """Restore what `_read_callbacks` returned; all workers call it."""
    names = [type(callback).__name__ for callback in callbacks]
    before = [name for name, *_ in states]
    if names != before:
        raise ValueError(
            "The training must resume with the callbacks of the interrupted run, "
            f"in the same order: {', '.join(before) or 'none'}. Received: "
            f"{', '.join(names) or 'none'}."
        )
    for number, (callback, (_, encoded, specs)) in enumerate(
        zip(callbacks, states, strict=True)
    ):
        state = decode(encoded)
        if not _counter_names(callback):
            callback.load_state_dict(state)
            continue
        for name, value in state.items():
            setattr(callback, name, value)
        if not specs:
            continue
        weights = [
            arrays.get(f"callbacks/{number}/{index}", np.zeros(shape, dtype))
            for index, (shape, dtype) in enumerate(specs)
        ]
        if workers is not None:
            tensors = [ops.convert_to_tensor(value) for value in weights]
            tensors = workers.broadcast("a backup's best weights", tensors)
            weights = [np.array(ops.convert_to_numpy(tensor)) for tensor in tensors]
        setattr(callback, _BEST_WEIGHTS, weights)


EpochIterator: Any = find_module(
    "EpochIterator", "keras.src.trainers.epoch_iterator"
).EpochIterator


_thread_state = threading.local()


def _expected_reader() -> "ResumableFit | None":
    """Return the backed-up `fit` that is about to read an epoch's batches, or None."""
    return getattr(_thread_state, "expected", None)


@hook(EpochIterator, "__iter__", "(self)", when=_expected_reader)
def _iter(original, fit, self):
    """Continue an interrupted epoch with its next batch."""
    _thread_state.expected = None
    fit.start_epoch(self, original)
    return self


@dataclass(frozen=True)
class _Position:
    """Position of a training in its data, as JSON values."""

    batch: int  # of the epoch
    read: int  # batches since the pass over the data started
    before: Any  # the random state at that start
    begun: bool  # the pass started before `before`
    now: Any  # the random state
    # `epoch_of` the data's adapter at that start and now.
    orders: Sequence[int | None] = (None, None)


def _continues_pass(iterator: Any) -> bool:
    """Return True if the next epoch continues the pass of the last one."""
    return (
        iterator.steps_per_epoch is not None and iterator._current_iterator is not None
    )


@contextlib.contextmanager
def back_up_fit(
    strategy: Strategy, model: keras.Model, arguments: dict[str, Any]
) -> Iterator[None]:
    """Context manager for a `fit` with backups that resumes from one if it exists."""
    # It changes `arguments`, the arguments of `fit` by name, in place.
    callbacks = given_callbacks(arguments)
    of_keras = keras.callbacks.BackupAndRestore
    if strategy.num_replicas_in_sync > 1:
        callbacks = [
            BackupAndRestore(c.backup_dir, c.save_freq, c.delete_checkpoint)
            if type(c) is of_keras
            else c
            for c in callbacks
        ]
    others = [type(c).__name__ for c in callbacks if isinstance(c, of_keras)]
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
        names = ", ".join(type(callback).__name__ for callback in found)
        raise ValueError(
            "`fit` accepts one callback that saves the state of training. Received: "
            f"{names}. BackupAndRestore resumes from what ShardedCheckpoint has saved."
        )
    (backup,) = found
    # Backups at the end of an epoch need no state within it.
    each_batch = backup.save_freq != "epoch" or backup.saves_on_demand
    data = find_source(arguments.get("x")).fit_state(each_batch)
    fit = ResumableFit(strategy, model, backup, data, callbacks)
    saver = backup.saver(fit)
    callbacks.append(saver)
    replace_callbacks(arguments, callbacks)
    backup.attach(fit)
    listening = getattr(saver, "listening", contextlib.nullcontext)
    recording = contextlib.nullcontext if data is None else data.recording
    try:
        with listening(), recording():
            yield
    finally:
        fit.folder.close()
        backup.attach(None)
        _thread_state.expected = None
        model._initial_epoch = None  # or the next `fit` would start there


class ResumableFit:
    """A `fit` with backups."""

    # Created before `fit` starts, as the backend's shuffle seed is fixed when arrays
    # become a dataset.

    def __init__(
        self,
        strategy: Strategy,
        model: keras.Model,
        backup: BackupAndRestore,
        data: FitState | None,
        callbacks: list[Any],
    ):
        self._strategy, self._model, self._backup = strategy, model, backup
        self.folder = BackupFolder(backup.backup_dir, backup.max_to_keep)
        self.cluster, self._data = strategy.extended.cluster, data
        self._callbacks = [c for c in callbacks if _counter_names(c) is not None]
        self.batch = 0
        self._iterator: Any = None
        # `before`, `begun` and the first of `orders` in the next backup's position.
        self._before: Any = None
        self._begun = False
        self._order: int | None = None
        # The backup from which `restore` has resumed, until its epoch starts.
        self._resumed: BackupContents | None = None
        self._saved_data: Any = None
        self._found = self.folder.read(self.cluster) if backup.resumes else None
        if self._found is not None:
            resume.set_random_state(self._found.facts["begin"])
        elif self.cluster is not None:
            resume.sync_random_states(self.cluster)
        self._begin = resume.get_random_state()

    def restore(self) -> None:
        """Make `fit` continue where the backup was written, if there is one."""
        found, self._found = self._found, None
        self._resumed = found
        if found is None:
            return
        facts = found.facts
        position = _Position(**facts["position"])
        self._model._initial_epoch = facts["epoch"]
        kinds_that_run_whole(self._model).update(facts.get("whole", ()))
        self.batch = position.batch
        self._build()
        variables = variables_of(self._model, metrics=False)
        saving.assign_variables(self._strategy, found, variables, ("metrics/",))
        self._check_fingerprint(found)
        saving.assign_seed(found)
        resume.set_random_state(position.now)
        states = facts["data"]
        self._saved_data = resume.state_of_this_worker(states, self.cluster)
        differs = facts["engine"] != get_engine().name
        differs |= (len(states) == 1) != (self.cluster is None)
        if differs and self._saved_data and self._data is not None:
            self._data.warn_other_reads()

    def _check_fingerprint(self, found: BackupContents) -> None:
        """Raise unless the model has the bits that were saved."""
        saved = found.facts.get("fingerprint")
        if saved is not None and self._strategy.virtual_replicas is not None:
            restored = str(fingerprint(self._model))
            if restored != saved:
                raise ValueError(
                    f"The model '{self._model.name}' resumes from {found.file}, but "
                    f"its variables have the fingerprint {restored}, not {saved} as "
                    "when it was saved. Create the model and its optimizer as before."
                )

    def begin(self) -> None:
        """Restore the counters of callbacks, which have been reset."""
        found = self._resumed
        if found is not None:
            workers = self._strategy.extended.group.workers
            states = found.facts["callbacks"]
            _restore_callbacks(self._callbacks, states, found.arrays, workers)

    def _build(self, iterator: Any = None) -> None:
        """Build what the backup has values of: metrics, too, if `iterator` is given."""
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
        """Expect the loop to read its batches next, in this thread."""
        self.batch = 0
        _thread_state.expected = self

    def start_epoch(self, iterator: Any, original: Callable[[Any], Any]) -> None:
        """Start an epoch of Keras's iterator; `original` starts a pass."""
        self._iterator = iterator
        found, self._resumed = self._resumed, None
        if found is not None:
            self._continue_epoch(found, iterator, original)
            return
        continues = _continues_pass(iterator)
        if not (continues and iterator._steps_seen):
            self._before, self._begun = resume.get_random_state(), continues
            self._order = data_adapters.epoch_of(iterator.data_adapter)
            if self._data is not None:
                self._data.start_pass(continues)
        original(iterator)

    def _continue_epoch(
        self, found: BackupContents, iterator: Any, original: Callable[[Any], Any]
    ) -> None:
        position = _Position(**found.facts["position"])
        adapter = iterator.data_adapter
        if position.read:
            _check_same_data(found, adapter, position)
        if position.batch:
            # Callbacks have already handled the start of the epoch.
            self._build(iterator)
            saving.assign_variables(self._strategy, found, variables_of(self._model))
            saving.assign_seed(found)
        steps, rest = divmod(position.batch, iterator.steps_per_execution)
        if rest:
            raise ValueError(
                f"The backup was written after {position.batch} batches of an epoch, "
                "which must be a multiple of `steps_per_execution`. Received: "
                f"steps_per_execution={iterator.steps_per_execution}"
            )
        self._before, self._begun = position.before, position.begun
        self._order, order = position.orders
        if not position.read:  # a pass starts here
            self._before, self._order = resume.get_random_state(), order
        data_adapters.set_epoch(adapter, self._order if position.read else order)
        to_read = position.read
        if self._data is not None:
            to_read -= self._data.restore(self._saved_data)
        if position.read:
            resume.set_random_state(position.before)
        if iterator.steps_per_epoch is not None and (position.begun or position.read):
            iterator._current_iterator = iter(iterator._get_iterator())
            if position.begun and position.read:
                resume.set_random_state(position.before)
        original(iterator)
        with data_adapters.skip_batches(adapter, to_read):
            batches = iterator._current_iterator
            for _ in range(steps):
                *_, batches = next(iterator._epoch_iterator)
            for number in range(to_read):
                if next(batches, None) is None:
                    raise ValueError(
                        f"The backup was written after {to_read} batches of the data, "
                        f"which now has {number}. The training must resume with the "
                        "data of the interrupted run."
                    )
        iterator._steps_seen = position.read
        data_adapters.set_epoch(adapter, order)
        resume.set_random_state(position.now)

    def save(self, epoch: int, batch: int) -> None:
        """Write a backup from which training continues at this epoch and batch."""
        strategy, cluster, iterator = self._strategy, self.cluster, self._iterator
        if cluster is not None:
            consistency.check_same_values(strategy, self._model, operation="the backup")
        continues = _continues_pass(iterator)
        read = iterator._steps_seen if batch or continues else 0
        position = _Position(
            batch,
            read,
            self._before,
            self._begun if read else continues,
            resume.get_random_state(),
            (self._order, data_adapters.epoch_of(iterator.data_adapter)),
        )
        data_states = [None]
        if self._data is not None:
            data_states = [self._data.state_at(read, position.begun)]
            if cluster is not None:
                data_states = cluster.exchange("the dataset state", data_states[0])
        variables = variables_of(self._model, metrics=batch > 0)
        facts, arrays, shards = saving.read_variables(strategy, variables)
        counters, best_weights = _read_callbacks(self._callbacks)
        facts |= {
            "callbacks": counters,
            "epoch": epoch,
            "engine": get_engine().name,
            "position": asdict(position),
            "data": data_states,
            "begin": self._begin,
            "counts": data_adapters.array_batch_counts(iterator.data_adapter),
            "model": self._model_config,
            "whole": sorted(kinds_that_run_whole(self._model)),
        }
        if strategy.virtual_replicas is not None and arrays:
            facts["fingerprint"] = fingerprint_of_arrays(arrays)
        arrays |= best_weights
        is_split = any(map(is_sharded, variables.values()))
        self.folder.save(
            cluster, facts, arrays, shards, is_split, self._backup.asynchronous
        )

    @functools.cached_property
    def _model_config(self) -> Any:
        """The model's configuration as JSON values; None if it has none."""
        try:
            config = _portable(keras.saving.serialize_keras_object(self._model))
            json.dumps(config)
        except (NotImplementedError, TypeError, ValueError):
            return None
        return config

    def wait(self) -> None:
        """Wait until the last backup is complete."""
        self.folder.wait(self.cluster)

    def clear(self) -> None:
        """Remove the backups."""
        run_on_chief(self.cluster, "the removal of the backups", self.folder.clear)


def _portable(config: Any) -> Any:
    """Return a configuration in which optimizers belong to no backend."""
    if isinstance(config, list):
        return [_portable(part) for part in config]
    if not isinstance(config, dict):
        return config
    config = {key: _portable(part) for key, part in config.items()}
    if str(config.get("module")).startswith("keras.src.backend."):
        config["module"] = "keras.optimizers"
    return config


def load_checkpoint(
    path: str | os.PathLike, model: keras.Model | None = None
) -> keras.Model:
    """Load the last checkpoint that `ShardedCheckpoint` or `BackupAndRestore` wrote.

    Sharded variables are read one after the other. The number of devices, `shard=` and
    the backend may differ from those that wrote it. With several workers, all of them
    call this.

    Args:
        path: The folder of the callback.
        model: A built model with the same weights, created in the scope or without a
            strategy. Its optimizer's state is loaded if it is compiled. By default the
            model is created from the configuration in the checkpoint, in the current
            scope; its own classes must be registered
            (`keras.saving.register_keras_serializable`).

    Returns:
        The model.

    Raises:
        ValueError: If there is no intact checkpoint, if it is of another model, or if
            its model has no configuration and `model` is None.

    Example:

    ```python
    import keras
    import numpy as np
    import keras_strategy as ks

    with ks.MirroredStrategy().scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    checkpoint = ks.callbacks.ShardedCheckpoint("checkpoints")
    x, y = np.ones((8, 2)), np.ones((8, 1))
    model.fit(x, y, verbose=0, callbacks=[checkpoint])
    ks.callbacks.load_checkpoint("checkpoints").save("plain.keras")
    ```
    """
    strategy: Any = model and ownership.strategy_of_model(model)
    strategy = strategy or get_strategy()
    cluster = strategy.extended.cluster
    found = BackupFolder(path).read(cluster)
    if found is None:
        raise ValueError(
            "Argument `path` must be a folder with a checkpoint. Received: "
            f"path={os.fspath(path)!r}, which has none."
        )
    if model is None:
        config, keys = found.facts.get("model"), found.facts["variables"]
        model = config and keras.saving.deserialize_keras_object(config)
        count = len([key for key in keys if key.startswith("model/")])
        if model is None or len(model.variables) != count:
            raise ValueError(
                f"{found.file} was written by a model whose configuration does not "
                "create its variables. Create the model, call it on a batch, and pass "
                "it as argument `model`."
            )
    optional = ["metrics/"]
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        keys = found.facts["variables"]
        optional += [key for key in keys if not key.startswith("model/")]
    elif not optimizer.built:
        owner = ownership.strategy_of_model(model)
        with contextlib.nullcontext() if owner is None else owner.scope():
            optimizer.build(model.trainable_variables)
    ownership.broadcast_pending_values()
    variables = variables_of(model, metrics=False)
    saving.assign_variables(strategy, found, variables, tuple(optional))
    return model


def _check_same_data(found: BackupContents, adapter: Any, position: _Position) -> None:
    """Raise unless an interrupted epoch's batches and their order are as before."""
    before, counts = found.facts["engine"], data_adapters.array_batch_counts(adapter)
    differs = before != get_engine().name
    differs |= (position.orders[1] is None) != (data_adapters.epoch_of(adapter) is None)
    if differs and counts is not None and adapter._shuffle:
        raise ValueError(
            f"{found.file} was written within an epoch of shuffled rows, whose order "
            f"{before} has drawn. Resume with that backend and version of Keras, or "
            "shuffle a PyDataset, whose order is the same on every backend."
        )
    if counts != found.facts["counts"]:
        raise ValueError(
            "The training must resume within an epoch with the data of the interrupted "
            "run. Received: batches, rows per batch and rows of the last batch: "
            f"{counts}, but {found.file} was written with {found.facts['counts']}."
        )
