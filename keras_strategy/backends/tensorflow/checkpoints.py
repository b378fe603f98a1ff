"""TensorFlow's own checkpoints, which the user has created."""

import os
import tempfile
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_strategy.training.saving import raise_if_any_failed

if TYPE_CHECKING:
    from keras_strategy.cluster.membership import Cluster

# tf.distribute's name, so that its checkpoints are found.
_STEPS = "checkpointed_runs"


class TensorFlowCheckpoints:
    """Checkpoints of `tf.train.CheckpointManager`s, which may save elsewhere.

    All workers save, because reading the variables may need all of them.
    """

    def __init__(
        self,
        reader: tf.train.CheckpointManager,
        writer: tf.train.CheckpointManager,
        cluster: "Cluster | None",
    ):
        self._reader, self._writer, self._cluster = reader, writer, cluster
        self._steps = tf.Variable(tf.zeros((), tf.int64), trainable=False, name=_STEPS)
        if hasattr(reader.checkpoint, _STEPS):
            self._steps = getattr(reader.checkpoint, _STEPS)
        else:
            setattr(reader.checkpoint, _STEPS, self._steps)

    def restore(self) -> int:
        """Restore the last checkpoint, if any, and return its number of steps."""
        path = self._reader.restore_or_initialize()
        steps = int(self._steps.numpy())
        restored = [None if path is None else os.path.basename(path), steps]
        if self._cluster is not None:
            by_worker = self._cluster.exchange("what is restored", restored)
            if any(other != restored for other in by_worker):
                raise ValueError(
                    "All workers must restore the same checkpoint of "
                    f"{self._reader.directory}: "
                    f"{self._cluster.format_by_worker(by_worker)}."
                )
        return steps

    def save(self, steps: int, *args: Any, **kwargs: Any) -> None:
        """Save, and wait until all workers have saved."""
        self._steps.assign(steps)
        error: Exception | None = None
        try:
            self._writer.save(*args, **kwargs)
        except Exception as caught:
            error = caught
        if self._cluster is not None:
            raise_if_any_failed(self._cluster, "a checkpoint", error)
        elif error is not None:
            raise error


def checkpoints(
    thing: Any, folder: Any, cluster: "Cluster | None"
) -> TensorFlowCheckpoints | None:
    """Return TensorFlow's checkpoints of an object, see `Engine.checkpoints`."""
    if isinstance(thing, tf.train.CheckpointManager):
        return TensorFlowCheckpoints(thing, thing, cluster)
    if not isinstance(thing, tf.train.Checkpoint):
        return None
    if folder is None:
        raise ValueError(
            "A tf.train.Checkpoint needs a folder: argument `checkpoint_dir`. "
            "Received: None"
        )
    manager = tf.train.CheckpointManager(thing, os.fspath(folder), max_to_keep=1)
    writer = manager
    if cluster is not None and not cluster.is_chief:
        scratch = tempfile.TemporaryDirectory()
        writer = tf.train.CheckpointManager(thing, scratch.name, max_to_keep=1)
        writer.scratch = scratch  # removes the folder with the manager
    return TensorFlowCheckpoints(manager, writer, cluster)
