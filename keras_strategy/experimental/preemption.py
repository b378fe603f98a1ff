"""Preemption handling, with the API of `tf.distribute.experimental`."""

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from keras_strategy.cluster.membership import Cluster, current_cluster
from keras_strategy.cluster.preemption import NextAction, Preemption, TerminationNotice
from keras_strategy.cluster_resolver.cluster_spec import training_tasks
from keras_strategy.core.registry import get_engine
from keras_strategy.keras_patches.saving import CheckpointManager
from keras_strategy.options import TerminationConfig


class PreemptionCheckpointHandler:
    """Saves and ends all workers of a custom loop when one of them is preempted.

    The constructor restores the last checkpoint. From then on, SIGTERM or the condition
    of a `TerminationConfig` is a preemption notice: before the next step, all workers
    save and exit with code 75, on which `keras-strategy run --max-restarts` restarts
    them. `fit` does not need this class: see `callbacks.BackupAndRestore`.

    Args:
        cluster_resolver: `strategy.cluster_resolver`, or None.
        checkpoint_or_checkpoint_manager: The objects to save, as one of:

            - a `CheckpointManager`, or the model or dict that it accepts.
            - an object whose `save(*args, **kwargs)` and `restore_or_initialize()` all
              workers call, such as a `tf.train.CheckpointManager`.
            - with TensorFlow, a `tf.train.Checkpoint`.
            - None, if `termination_config` has a `save_fn`.
        checkpoint_dir: The folder of a checkpoint; a manager has a folder of its own.
        termination_config: A `TerminationConfig`.

    Raises:
        ValueError: If there is nothing to save, or no folder.
        NotImplementedError: If the cluster has parameter servers.
        RuntimeError: If the cluster has several workers, and their
            `MultiWorkerMirroredStrategy` does not exist yet.

    Example:

    ```python
    import keras
    import keras_strategy as ks

    strategy = ks.MirroredStrategy(["cpu:0"])
    with strategy.scope():
        total = keras.Variable(0.0, trainable=False)
    handler = ks.experimental.PreemptionCheckpointHandler(
        strategy.cluster_resolver, {"total": total}, "checkpoints"
    )
    for _ in range(handler.total_run_calls, 3):
        handler.run(total.assign_add, 1.0)
    assert float(total) == handler.total_run_calls == 3
    ```
    """

    def __init__(
        self,
        cluster_resolver: Any,
        checkpoint_or_checkpoint_manager: Any,
        checkpoint_dir: str | os.PathLike | None = None,
        termination_config: TerminationConfig | None = None,
    ):
        config = termination_config or TerminationConfig()
        cluster = current_cluster()
        if cluster_resolver is not None:
            _require_connected(cluster_resolver, cluster)
        self._save_fn = config.save_fn
        self._checkpoints = saved = _checkpoints(
            checkpoint_or_checkpoint_manager, checkpoint_dir, cluster, config.save_fn
        )
        self._preemption = Preemption(config, cluster)
        self._run_calls = saved.restore_or_initialize() if saved else 0
        self._preemption.notice.start()
        weakref.finalize(self, self._preemption.notice.stop)

    @property
    def total_run_calls(self) -> int:
        """Number of steps run, including those before a restart."""
        return self._run_calls

    def run(
        self, distributed_train_function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a step and return its result, or save and exit if a worker was preempted.

        Args:
            distributed_train_function: The function, which calls `strategy.run`. It
                must read checkpointed data itself: arguments are evaluated before the
                save, so a batch among them would be lost.
            *args: Its arguments.
            **kwargs: Its keyword arguments.
        """
        self._save_if_preempted()
        result = distributed_train_function(*args, **kwargs)
        self._run_calls += 1
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Save and exit if a worker was preempted, in loops that do not call `run`.

        Call it after each step, on all workers.

        Args:
            *args: Arguments of the manager's `save`, or of `save_fn`.
            **kwargs: Keyword arguments of it.
        """
        self._run_calls += 1
        self._save_if_preempted(*args, **kwargs)

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Context manager for a loop that calls `run`; does nothing.

        Exists for compatibility: tf.distribute needs it on TPUs only.
        """
        yield

    def _save_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        action = self._preemption.after_step()
        if action is NextAction.CONTINUE:
            return
        with self._preemption.saving():
            if self._save_fn is not None:
                self._save_fn(*args, **kwargs)
            elif self._checkpoints is not None:
                self._checkpoints.save(self._run_calls, *args, **kwargs)
        if action is NextAction.SAVE_AND_END:
            self._preemption.end()


class PreemptionWatcher:
    """Watcher of this worker's preemption notice, SIGTERM.

    Create it in the main thread. From then on, SIGTERM has no other effect on this
    process. tf.distribute's class watches only Google's TPUs.

    Example:

    ```python
    import os
    import signal

    import keras_strategy as ks

    watcher = ks.experimental.PreemptionWatcher()
    assert watcher.preemption_message is None
    os.kill(os.getpid(), signal.SIGTERM)
    assert "SIGTERM" in watcher.preemption_message
    ```
    """

    def __init__(self):
        self._notice = TerminationNotice()
        self._notice.start()
        weakref.finalize(self, self._notice.stop)

    @property
    def preemption_message(self) -> str | None:
        """Reason why this worker must end; None if there is none."""
        is_preempted = self._notice.since is not None
        return "this worker was told to end by SIGTERM" if is_preempted else None

    def block_until_worker_exit(self) -> None:
        """Do nothing: tf.distribute waits here for TPUs, which are other workers."""


class _Manager:
    """The user's checkpoint manager, which does not record the number of steps."""

    def __init__(self, manager: Any):
        self._manager = manager

    def restore_or_initialize(self) -> int:
        self._manager.restore_or_initialize()
        return 0

    def save(self, steps: int, *args: Any, **kwargs: Any) -> None:
        self._manager.save(*args, **kwargs)


def _require_connected(resolver: Any, cluster: Cluster | None) -> None:
    spec = resolver.cluster_spec()
    if "ps" in spec.jobs:
        raise NotImplementedError(
            "PreemptionCheckpointHandler does not support parameter servers. "
            f"Received: cluster_resolver of {spec.as_dict()}"
        )
    workers = len(training_tasks(spec))
    if workers > 1 and cluster is None:
        raise RuntimeError(
            "Create the MultiWorkerMirroredStrategy before its "
            "PreemptionCheckpointHandler. Received: cluster_resolver of "
            f"{workers} workers, which are not connected."
        )


def _checkpoints(thing: Any, folder: Any, cluster: Cluster | None, save_fn: Any) -> Any:
    """Return an object with `restore_or_initialize()` and `save(steps)`, or None."""
    if thing is None:
        if save_fn is None:
            raise ValueError(
                "Argument `checkpoint_or_checkpoint_manager` must be an object to "
                "save, unless `termination_config` has a `save_fn`. Received: None"
            )
        return None
    if isinstance(thing, CheckpointManager):
        return thing
    is_manager = hasattr(thing, "restore_or_initialize") and hasattr(thing, "save")
    if not is_manager and folder is None:
        raise ValueError(
            "A checkpoint needs a folder: argument `checkpoint_dir`. Received: None"
        )
    native = get_engine().checkpoints(thing, folder, cluster)
    if native is not None or is_manager:
        return native or _Manager(thing)
    return CheckpointManager(thing, folder)
