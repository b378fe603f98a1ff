"""Where Keras saves and restores: the chief alone writes and reads for all workers."""

import keras

from keras_strategy.hooks.conditions import of_workers
from keras_strategy.hooks.hook import hook
from keras_strategy.rules import entry_scope, first_values
from keras_strategy.rules.one_writer import saving


@hook(keras.Model, ("save", "save_weights", "export"), ("filepath",), when=of_workers)
def _save(original, strategy, self, filepath, *args, **kwargs):
    """The chief writes for all workers."""
    first_values.settle()  # also if the chief cannot write
    what = f"`{original.__name__}`"
    with saving(strategy.extended.cluster, filepath, what) as path:
        return original(self, path, *args, **kwargs)


def _trains_on_workers(callback):
    """The strategy of a callback's model, if it is of several workers."""
    return of_workers(callback.model)


@hook(
    keras.callbacks.BackupAndRestore,
    "on_train_begin",
    ("logs",),
    when=_trains_on_workers,
)
def _restore(original, strategy, self, logs=None):
    """The chief alone restores.

    The others may not see its folder; they get what it restored when all callbacks
    have begun. To load makes variables and throws them away: they are not everybody's.
    """
    optimizer = self.model.optimizer
    if self.model.built and not optimizer.built:
        optimizer.build(self.model.trainable_variables)
        first_values.settle()  # which the chief could not do alone
    if strategy.extended.cluster.is_chief:
        with entry_scope.left_for(None):
            original(self, logs)
