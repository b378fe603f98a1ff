"""TensorFlow's own checkpoints, which the user has made."""

import os
import tempfile
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_strategy.rules.one_writer import all_hear

if TYPE_CHECKING:
    from keras_strategy.workers.cluster import Cluster

# As tf.distribute calls it, so that its checkpoints are found here.
_STEPS = "checkpointed_runs"


class TensorFlowCheckpoints:
    """A `tf.train.CheckpointManager`; all workers save, as its variables may need.

    Args:
        read: From where the last checkpoint is taken.
        write: Where the next one goes.
        cluster: The workers, or None.
    """

    def __init__(
        self,
        read: tf.train.CheckpointManager,
        write: tf.train.CheckpointManager,
        cluster: "Cluster | None",
    ):
        self._read, self._write, self._cluster = read, write, cluster
        self._steps = tf.Variable(tf.zeros((), tf.int64), trainable=False, name=_STEPS)
        if hasattr(read.checkpoint, _STEPS):
            self._steps = getattr(read.checkpoint, _STEPS)
        else:
            setattr(read.checkpoint, _STEPS, self._steps)

    def restore(self) -> int:
        """Takes the last checkpoint, if there is one; how many steps had been run."""
        path = self._read.restore_or_initialize()
        steps = int(self._steps.numpy())
        found = [None if path is None else os.path.basename(path), steps]
        if self._cluster is not None:
            told = self._cluster.agree("what is restored", found)
            if any(other != found for other in told):
                raise ValueError(
                    "All workers must restore the same checkpoint of "
                    f"{self._read.directory}: {self._cluster.listed(told)}."
                )
        return steps

    def save(self, steps: int, *args: Any, **kwargs: Any) -> None:
        """Saves, and waits until all workers have."""
        self._steps.assign(steps)
        error: Exception | None = None
        try:
            self._write.save(*args, **kwargs)
        except Exception as caught:
            error = caught
        if self._cluster is not None:
            all_hear(self._cluster, "a checkpoint", error)
        elif error is not None:
            raise error


def checkpoints(
    thing: Any, folder: Any, cluster: "Cluster | None"
) -> TensorFlowCheckpoints | None:
    """See `keras_strategy.core.engine.Engine.checkpoints`."""
    if isinstance(thing, tf.train.CheckpointManager):
        return TensorFlowCheckpoints(thing, thing, cluster)
    if not isinstance(thing, tf.train.Checkpoint):
        return None
    if folder is None:
        raise ValueError(
            "A tf.train.Checkpoint needs a folder: argument `checkpoint_dir`. "
            "Received: None"
        )
    read = write = tf.train.CheckpointManager(thing, os.fspath(folder), max_to_keep=1)
    if cluster is not None and not cluster.is_chief:
        scratch = tempfile.TemporaryDirectory()
        write = tf.train.CheckpointManager(thing, scratch.name, max_to_keep=1)
        write.scratch = scratch  # it is removed with it
    return TensorFlowCheckpoints(read, write, cluster)
