"""Where Keras's callbacks are extended on every backend: who is told of batches.

Where Keras's trainer is extended on every backend: `fit` and its like.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

from keras_strategy.core import context
from keras_strategy.core.per_replica_attributes import setattr_hooks
from keras_strategy.data import random
from keras_strategy.data.prefetch import prefetch_disabled, stop_prefetchers_on_exit
from keras_strategy.keras_patches import consistency as mirror_consistency
from keras_strategy.keras_patches.data_adapters import (
    building,
    for_keras,
    take_class_weight,
)
from keras_strategy.keras_patches.patch import hook, in_scope, model_hook
from keras_strategy.keras_patches.resume import backed_up
from keras_strategy.keras_patches.variables_optimizers import adopt_variables, stored
from keras_strategy.training import callbacks as training_callbacks
from keras_strategy.training import consistency, ownership
from keras_strategy.training.callbacks import LogFreeCallback
from keras_strategy.training.ownership import strategy_of_model

_SAVING = (keras.callbacks.BackupAndRestore, keras.callbacks.ModelCheckpoint)
# A method of Keras's own that does nothing with a batch and its logs.
_NOBODY = keras.callbacks.Callback().on_batch_end


@hook(keras.callbacks.CallbackList, "on_epoch_begin", "(self, epoch, logs=None)")
def _on_epoch_begin(original, self, epoch, logs=None):
    """Nothing is made of a batch's logs where no callback takes them.

    Keras hands the logs of every batch to a thread that reads them, or waits for them
    itself, before it asks the callbacks, most of which want the epochs alone.
    """
    original(self, epoch, logs)
    _tell_whoever_listens(self, "train")


@hook(
    keras.callbacks.CallbackList,
    ("on_test_begin", "on_predict_begin"),
    "(self, logs=None)",
)
def _on_begin(original, self, logs=None):
    """Nothing is made of a batch's logs where no callback takes them.

    See `_on_epoch_begin`.
    """
    original(self, logs)
    _tell_whoever_listens(self, original.__name__.split("_")[1])


def _tell_whoever_listens(callbacks: keras.callbacks.CallbackList, kind: str) -> None:
    """Takes the calls for each batch out of a list, or puts them back.

    Args:
        callbacks: The list.
        kind: "train", "test" or "predict".
    """
    own = type(callbacks) is not keras.callbacks.CallbackList
    for time in ("begin", "end"):
        name = f"on_{kind}_batch_{time}"
        vars(callbacks).pop(name, None)
        if own or context.current_scope() is None:
            continue
        told = [c for c in callbacks.callbacks if listens(c, kind, time)]
        if all(isinstance(callback, LogFreeCallback) for callback in told):
            vars(callbacks)[name] = _told_without_logs(told, name) if told else _NOBODY


def _told_without_logs(told: list[LogFreeCallback], name: str) -> Callable:
    methods = [getattr(callback, name) for callback in told]

    def tell(batch: int, logs: Any = None) -> None:
        for method in methods:
            method(batch)

    return tell


def listens(callback: keras.callbacks.Callback, kind: str, time: str = "end") -> bool:
    """Whether a callback may do something with a batch.

    Args:
        callback: The callback.
        kind: "train", "test" or "predict".
        time: "begin" or "end" of the batch.
    """
    idle: list[type] = [keras.callbacks.Callback]
    names = [f"on_{kind}_batch_{time}"]
    if kind == "train":
        names.append(f"on_batch_{time}")
        if isinstance(callback, _SAVING) and callback.save_freq == "epoch":
            idle += _SAVING
            names.append("_should_save_on_batch")
    return not all(_is_one_of(callback, name, idle) for name in names)


def _is_one_of(callback: Any, name: str, owners: list[type]) -> bool:
    """Whether a callback's method is that of one of some classes."""
    function = getattr(getattr(callback, name, None), "__func__", None)
    return function in [vars(owner).get(name, _NOBODY) for owner in owners]


_LOOPS = ("fit", "evaluate", "predict")
_ON_BATCH = ("train_on_batch", "test_on_batch", "predict_on_batch")


@model_hook(("compile", *_LOOPS, *_ON_BATCH), ())
def _entry_point(original, self, *args, **kwargs):
    """It works in the scope of the model's strategy."""
    name = original.__name__
    strategy = strategy_of_model(self)
    args = [for_keras(x, strategy, name) for x in args]
    kwargs = {k: for_keras(x, strategy, name) for k, x in kwargs.items()}
    if name == "fit":
        take_class_weight(original, self, args, kwargs)
    ended = stop_prefetchers_on_exit() if name in _LOOPS else contextlib.nullcontext()
    with ended, ownership.suspend_implicit_scope(strategy):
        if strategy is None:
            _require_no_scope(self, name)
            return original(self, *args, **kwargs)
        context.require_cross_replica(strategy, name)
        with ownership.enter_implicit_scope(strategy):
            if name != "compile":  # which may be a part of a user's own
                adopt_variables(strategy, self)
            return _of_strategy(strategy, original, self, args, kwargs)


def _require_no_scope(model: keras.Model, name: str) -> None:
    current = context.current_scope()
    if current is not None:
        raise ValueError(
            f"`{name}` was called in the scope of {current!r} on the model "
            f"'{model.name}', which was made outside of it. Make the model inside "
            f"`with strategy.scope():`, or call `{name}` outside the scope to "
            "work on one device."
        )


def _of_strategy(
    strategy: Any, original: Callable, model: keras.Model, args: Any, kwargs: Any
) -> Any:
    """Keras's method, with the arguments that the replicas and workers need."""
    cluster = strategy.extended.cluster
    name = original.__name__
    alone = cluster is None and strategy.num_replicas_in_sync == 1
    if alone and name in _LOOPS:
        setattr_hooks.end()  # there are no turns here
    if alone and name != "fit":
        return original(model, *args, **kwargs)
    try:
        call = _signature(original).bind(model, *args, **kwargs)
    except TypeError:
        return original(model, *args, **kwargs)  # which says what is wrong
    if name == "fit":
        with backed_up(strategy, model, call.arguments):
            return _of_replicas(strategy, alone, original, model, call)
    return _of_replicas(strategy, alone, original, model, call)


def _of_replicas(
    strategy: Any, alone: bool, original: Callable, model: keras.Model, call: Any
) -> Any:
    if alone:
        return original(*call.args, **call.kwargs)
    cluster, name = strategy.extended.cluster, original.__name__
    if cluster is not None and name != "compile":
        ownership.broadcast_pending_values()
        if name == "fit":  # which says what it does when its callbacks are known
            random.sync_with_chief(cluster)
        else:  # one round for both: some are called for each batch
            said = consistency.call_signature(call.arguments)
            told = consistency.check_workers_agree(
                cluster, said, random.random_state_digest(), name
            )
            random.sync_with_chief(cluster, told)
        if name in _LOOPS:
            lead = functools.partial(_chiefs_lead, strategy, model, call.arguments)
            training_callbacks.prepare_fit_arguments(
                name, call.arguments, cluster, lead
            )
    if name == "fit" and mirror_consistency.enabled:
        add_callback(call.arguments, mirror_consistency.BatchCheck(strategy))
    elif name == "fit" and cluster is None:
        add_callback(call.arguments, mirror_consistency.EpochCheck(strategy))
    with strategy.extended.group.trainer_scope(model, name, call.arguments):
        result = original(*call.args, **call.kwargs)
    if mirror_consistency.enabled:
        mirror_consistency.check(strategy, name)
    return result


_signature = functools.cache(inspect.signature)


def add_callback(arguments: dict[str, Any], callback: keras.callbacks.Callback) -> bool:
    """Adds a callback to the arguments of `fit` or its like.

    Args:
        arguments: The arguments by name; changed in place.
        callback: The callback, to be called last.

    Returns:
        Whether it was added: what the user put into a `CallbackList` is the user's.
    """
    callbacks = arguments.get("callbacks")
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return False
    arguments["callbacks"] = [*keras.tree.flatten(callbacks or []), callback]
    return True


def _chiefs_lead(
    strategy: Any,
    model: keras.Model,
    arguments: dict[str, Any],
    in_step: list[Any],
    own_minds: bool,
) -> training_callbacks.SyncTrainingState:
    cluster = strategy.extended.cluster
    items = consistency.fit_signature(model, compiled_with(model), arguments, in_step)

    def give_variables(model):
        variables = [*model.variables, *model.optimizer.variables]
        ownership.broadcast_from_chief(
            strategy,
            [variable for variable in variables if stored(variable) is not None],
        )

    def set_epoch(model, epoch):
        model._initial_epoch = epoch

    in_batches = any(consistency.check_workers_agree(cluster, items, own_minds))
    kind = (
        training_callbacks.SyncTrainingStatePerBatch
        if in_batches
        else training_callbacks.SyncTrainingState
    )
    return kind(
        cluster,
        give_variables,
        lambda model: model._initial_epoch,
        set_epoch,
        functools.partial(mirror_consistency.require_same_values, strategy),
    )


def compiled_with(model: keras.Model) -> dict[str, Any]:
    """The arguments of a model's `compile`; none where its class has one of its own."""
    compiled = getattr(model, "_compile_config", None)
    return {} if compiled is None else compiled.config


@model_hook("_symbolic_build", "(self, iterator=None, data_batch=None)", when=in_scope)
def _symbolic_build(original, strategy, self, iterator=None, data_batch=None):
    """What fit builds may hold metrics from outside. One batch is read for it."""
    with prefetch_disabled(), building(iterator):
        result = original(self, iterator, data_batch)
    adopt_variables(strategy, self)
    ownership.broadcast_pending_values()
    return result
