"""Machines that are taken away, in the words of `tf.distribute.experimental`."""

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from keras_strategy.core.registry import get_engine
from keras_strategy.hooks.checkpoints import Checkpoint
from keras_strategy.options.termination import TerminationConfig
from keras_strategy.workers.cluster import Cluster
from keras_strategy.workers.joining import joined
from keras_strategy.workers.preemption import Next, Notice, Preemption


class _Checkpoints(Protocol):
    def restore(self) -> int: ...

    def save(self, steps: int, *args: Any, **kwargs: Any) -> Any: ...


class PreemptionCheckpointHandler:
    """Has the workers of a program's own loop save and end together when one must.

    It takes the values of the last checkpoint when it is made. From then on SIGTERM, or
    what a `TerminationConfig` says, is a notice: before the next step all workers
    save, and end with the exit code 75, with which `keras-strategy run --max-restarts`
    starts them again. `fit` needs none of it: see `callbacks.BackupAndRestore`.

    Args:
        cluster_resolver: `strategy.cluster_resolver`, or None.
        checkpoint_or_checkpoint_manager: What to save: a model, or models, layers,
            optimizers, metrics, variables and data that has `state_dict()` and
            `load_state_dict(state)` in a dict by names of yours. They are saved with
            the states of the random generators, by the chief, whole or not at all, and
            come back on another number of workers and on another backend. Or an object
            whose `save(*args, **kwargs)` and `restore_or_initialize()` all workers
            call, such as a `tf.train.CheckpointManager`; with TensorFlow also a
            `tf.train.Checkpoint`. None, where `save_fn` of the configuration saves.
        checkpoint_dir: The folder of a checkpoint; a manager has its own.
        termination_config: A `TerminationConfig`.

    Example:

    ```python
    import tempfile

    import keras
    import keras_strategy as ks

    strategy = ks.MirroredStrategy(["cpu:0"])
    with strategy.scope():
        total = keras.Variable(0.0, aggregation="sum")
    step = keras.Variable(0, dtype="int32", trainable=False)

    def train_step():
        strategy.run(lambda: total.assign_add(1.0))

    with tempfile.TemporaryDirectory() as folder:
        handler = ks.experimental.PreemptionCheckpointHandler(
            strategy.cluster_resolver, {"total": total, "step": step}, folder
        )
        for _ in range(handler.total_run_calls, 3):
            handler.run(train_step)
            step.assign_add(1)
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
        cluster = joined()
        if cluster_resolver is not None:
            _require_known(cluster_resolver, cluster)
        self._save_fn = config.save_fn
        self._checkpoints = _checkpoints(
            checkpoint_or_checkpoint_manager, checkpoint_dir, cluster, config.save_fn
        )
        self._preemption = preemption = Preemption(
            config,
            lambda says: (
                [says] if cluster is None else cluster.agree("whether to end", says)
            ),
        )
        self._run_calls = self._checkpoints.restore() if self._checkpoints else 0
        preemption.notice.start()
        weakref.finalize(self, preemption.notice.stop)

    @property
    def total_run_calls(self) -> int:
        """How many steps were run, those before the program was started again too."""
        return self._run_calls

    def run(
        self, distributed_train_function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Runs a step, after it has saved and ended if a worker was told to end.

        Args:
            distributed_train_function: The function, which calls `strategy.run`. It
                reads what is saved as data, since its arguments are there before.
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Returns:
            What it returned.
        """
        self._save_if_preempted()
        result = distributed_train_function(*args, **kwargs)
        self._run_calls += 1
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Saves, and ends, if a worker was told to; for loops that do not call `run`.

        Call it after each step, on all workers.

        Args:
            *args: For the `save` of a manager, or for `save_fn`.
            **kwargs: Likewise.
        """
        self._run_calls += 1
        self._save_if_preempted(*args, **kwargs)

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Surrounds a loop that calls `run`.

        tf.distribute needs it on TPUs alone; here it does nothing, so that a program
        which has it runs.
        """
        yield

    def _save_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        what = self._preemption.after_step()
        if what is Next.GO_ON:
            return
        with self._preemption.saving():
            if self._save_fn is not None:
                self._save_fn(*args, **kwargs)
            elif self._checkpoints is not None:
                self._checkpoints.save(self._run_calls, *args, **kwargs)
        if what is Next.SAVE_AND_END:
            self._preemption.end()


class PreemptionWatcher:
    """Notes that this worker was told to end: SIGTERM came.

    tf.distribute watches Google's TPUs alone. Here it watches this process, from when
    it is made in the main thread; nothing else happens on SIGTERM then.

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
        self._notice = Notice()
        self._notice.start()
        weakref.finalize(self, self._notice.stop)

    @property
    def preemption_message(self) -> str | None:
        """Why this worker is about to end; None if it is not."""
        told = self._notice.since is not None
        return "this worker was told to end by SIGTERM" if told else None

    def block_until_worker_exit(self) -> None:
        """Does nothing: tf.distribute waits for TPUs here, which are other workers."""


class _Manager:
    """An object of the user's that saves and restores by itself."""

    def __init__(self, manager: Any):
        self._manager = manager

    def restore(self) -> int:
        self._manager.restore_or_initialize()
        return 0

    def save(self, steps: int, *args: Any, **kwargs: Any) -> None:
        self._manager.save(*args, **kwargs)


def _require_known(resolver: Any, cluster: Cluster | None) -> None:
    """Raises where the workers that a resolver names have not come together."""
    spec = resolver.cluster_spec()
    if "ps" in spec.jobs:
        raise NotImplementedError(
            "PreemptionCheckpointHandler is not for parameter servers. Received: "
            f"cluster_resolver of {spec.as_dict()}"
        )
    workers = sum(
        spec.num_tasks(job) for job in ("chief", "worker") if job in spec.jobs
    )
    if workers > 1 and cluster is None:
        raise RuntimeError(
            "Make the MultiWorkerMirroredStrategy before its "
            f"PreemptionCheckpointHandler. Received: cluster_resolver of {workers} "
            "workers, which have not come together."
        )


def _checkpoints(
    thing: Any, folder: Any, cluster: Cluster | None, save_fn: Any
) -> _Checkpoints | None:
    if thing is None:
        if save_fn is None:
            raise ValueError(
                "Argument `checkpoint_or_checkpoint_manager` must say what to save, "
                "where `termination_config` has no `save_fn`. Received: None"
            )
        return None
    of_engine = get_engine().checkpoints(thing, folder, cluster)
    if of_engine is not None:
        return of_engine
    if hasattr(thing, "restore_or_initialize") and hasattr(thing, "save"):
        return _Manager(thing)
    if folder is None:
        raise ValueError(
            "A checkpoint needs a folder: argument `checkpoint_dir`. Received: None"
        )
    return Checkpoint(thing, folder)
