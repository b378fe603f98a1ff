"""Callbacks with several workers: the chief writes, and all start and stop together.

All workers run the same program, so all of them make callbacks that write, restore and
stop training.
"""

from collections.abc import Callable
from typing import Any

import keras

from keras_strategy.rules import backups
from keras_strategy.rules.without_logs import LogFreeCallback
from keras_strategy.workers.cluster import Cluster

# They write, and nothing that the workers do together depends on them.
_OF_THE_CHIEF = (
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.ProgbarLogger,
)
# They write together, or change what is trained: they must be on every worker.
SYNCHRONIZED_CALLBACKS = (
    *backups.BACKUP_CALLBACKS,
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
