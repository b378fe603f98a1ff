"""`run_elastic`: training that goes on when workers fail or join."""

import contextlib
import gc
import importlib
import logging
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from keras_strategy.cluster.elastic import WorkersChangedError, elastic_worker
from keras_strategy.cluster.membership import current_cluster
from keras_strategy.cluster.process_exit import EXIT_OTHER_WORKER_FAILED
from keras_strategy.core.registry import get_engine
from keras_strategy.errors import ClusterError, WorkerFailedError
from keras_strategy.strategies.base import close_strategies

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

logger = logging.getLogger("keras_strategy")


def run_elastic(
    train: Callable[Arguments, Result],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> Result:
    """Call `train`, and call it again with the remaining workers when some fail.

    `keras-strategy run --min-workers` starts such programs. When a worker ends, the
    others leave `train`, form a new cluster and call it again. The ended worker is
    started again; when it is ready, all workers leave `train` after the current batch
    and call it again with one more. On torch the other processes go on; on JAX and
    TensorFlow, whose engines connect once, all workers start again.

    `train` creates its strategy, its model and its data anew in each call. It resumes
    by a `BackupAndRestore` that it passes to `fit`, or by a
    `PreemptionCheckpointHandler`. Both save before a worker joins. When one fails, what
    follows the last backup is trained again: choose `save_freq` accordingly.

    Without that launcher, this calls `train` once.

    Args:
        train: The function, which creates a `MultiWorkerMirroredStrategy`.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        What `train` returns, when it ends.

    Raises:
        Exception: What `train` raises, unless another worker's failure caused it.

    Example:

    ```python
    import keras
    import numpy as np
    import keras_strategy as ks

    def train(epochs):
        keras.utils.set_random_seed(1)
        strategy = ks.MultiWorkerMirroredStrategy()
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("adam", "mse")
        x, y = np.ones((8, 2)), np.ones((8, 1))
        backup = ks.callbacks.BackupAndRestore("backup", save_freq=10)
        model.fit(x, y, batch_size=4, epochs=epochs, callbacks=[backup], verbose=0)
        return model.get_weights()

    weights = ks.run_elastic(train, epochs=2)
    ```
    """
    worker = elastic_worker()
    if worker is None:
        return train(*args, **kwargs)
    can_disconnect = get_engine().can_disconnect
    # `fit` imports it where it is installed: do so before other workers wait.
    with contextlib.suppress(ImportError):
        importlib.import_module("tensorflow")
    while True:
        worker.wait_for_cluster()
        try:
            return train(*args, **kwargs)
        except (WorkerFailedError, WorkersChangedError, ClusterError) as error:
            if isinstance(error, ClusterError) and not worker.must_leave:
                raise
            if not can_disconnect:
                if isinstance(error, WorkerFailedError):
                    raise
                sys.exit(EXIT_OTHER_WORKER_FAILED)
            if str(error):
                logger.warning("Training stops to go on with other workers: %s", error)
        cluster = current_cluster()
        if cluster is not None:
            close_strategies(cluster)
        gc.collect()  # the model that the error's traceback referred to
