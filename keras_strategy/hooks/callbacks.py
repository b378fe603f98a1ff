"""Where Keras's callbacks are extended on every backend: who is told of batches."""

from collections.abc import Callable
from typing import Any

import keras

from keras_strategy.core import context
from keras_strategy.hooks.hook import hook
from keras_strategy.rules.without_logs import LogFreeCallback

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
