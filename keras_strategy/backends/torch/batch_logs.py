"""Whether anybody reads the logs of the batches, which costs a collective each."""

from typing import Any

import keras

from keras_strategy.hooks.callbacks import listens
from keras_strategy.rules.without_logs import LogFreeCallback

_ATTRIBUTE = "_ks_batch_logs"


class BatchLogs:
    """What becomes of the logs that a train or test function returns.

    Keras's loop gives them to the callbacks, and ends the epoch with the metrics' own
    results where all logs are named after metrics.

    Attributes:
        are_read: Whether somebody may look at them.
        of_metrics: The names of the model's metrics; None until a batch was merged.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Somebody looks, as far as is known."""
        self.are_read = True
        self.of_metrics: set[str] | None = None

    def of_own_step(self, model: keras.Model) -> dict[str, Any]:
        """The logs of a step that returns the model's metrics and no more."""
        return model.get_metrics_result() if self.are_read else _Unread(model)

    def are_needed(self, logs: Any) -> bool:
        """Whether logs of a user's step must be those of all replicas.

        Args:
            logs: What the replicas returned.
        """
        return self.are_read or not isinstance(logs, dict) or self._differ(logs)

    def _differ(self, logs: dict) -> bool:
        return self.of_metrics != set(logs)

    @staticmethod
    def of(function: Any) -> "BatchLogs | None":
        """Those of a function that was given some with `give_to`."""
        return getattr(function, _ATTRIBUTE, None)

    def give_to(self, function: Any) -> None:
        """Lets others find them by the function."""
        setattr(function, _ATTRIBUTE, self)


class _Unread(dict):
    """A model's metrics, of which nobody asks for more than the names.

    Keras does at the end of an epoch, and then takes the metrics themselves.

    Args:
        model: The model.
    """

    def __init__(self, model: keras.Model):
        super().__init__()
        self._model = model

    def keys(self) -> Any:
        """The names, of which other workers need not be asked."""
        with keras.StatelessScope():
            return self._model.get_metrics_result().keys()


def may_read(callback: keras.callbacks.Callback, kind: str) -> bool:
    """Whether a callback may look at the logs of a batch.

    Args:
        callback: The callback.
        kind: "train" or "test".
    """
    return not isinstance(callback, LogFreeCallback) and listens(callback, kind)


def detect_log_readers(strategy: Any, method: str, arguments: dict[str, Any]) -> None:
    """Has Keras's loop find out, when it begins, whether its logs are read.

    Where nobody does, on any worker, they need not be brought together. A loop that is
    not Keras's may, and so may whoever made a `CallbackList`.

    Args:
        strategy: The strategy.
        method: "fit" or "evaluate".
        arguments: The method's arguments by name; changed in place.
    """
    callbacks = arguments.get("callbacks")
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return  # that of `fit` has a watch already
    listed = list(keras.tree.flatten(callbacks or []))
    # Keras adds a progress bar, which reads them.
    shown = arguments.get("verbose", "auto") != 0
    arguments["callbacks"] = [*listed, _ReaderWatch(strategy, listed, shown)]


class _ReaderWatch(keras.callbacks.Callback):
    """Notes who reads the logs of batches, when a loop begins.

    Args:
        strategy: The strategy.
        callbacks: The other callbacks.
        shown: Whether Keras shows the logs.
    """

    def __init__(self, strategy: Any, callbacks: list[Any], shown: bool):
        super().__init__()
        self._strategy = strategy
        self._callbacks = callbacks
        self._shown = shown

    def on_train_begin(self, logs: Any = None) -> None:
        """Asks for the logs of `fit`."""
        self._note("train", "fit")

    def on_test_begin(self, logs: Any = None) -> None:
        """Asks for the logs of `evaluate`."""
        self._note("test", "evaluate")

    def _note(self, kind: str, loop: str) -> None:
        batch_logs = BatchLogs.of(getattr(self.model, f"{kind}_function"))
        if batch_logs is None:
            return
        own_loop = getattr(type(self.model), loop) is not getattr(keras.Model, loop)
        read = (
            own_loop or self._shown or any(may_read(c, kind) for c in self._callbacks)
        )
        cluster = self._strategy.extended.cluster
        if cluster is not None:
            read = any(cluster.exchange("whether the logs of batches are read", read))
        batch_logs.are_read = read
