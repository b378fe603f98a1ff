"""`launch`: a function in several local worker processes."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from keras_strategy.cluster.membership import find_workers
from keras_strategy.cluster_resolver import detect
from keras_strategy.commands.local_cluster import (
    count_workers,
    gpu_variables,
    thread_limits,
)
from keras_strategy.testing.worker_runner import WorkerFailed, WorkerRunner

Result = TypeVar("Result")


def launch(
    function: Callable[..., Result],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    workers: int | Literal["auto"] = "auto",
    gpus_per_worker: int | None = None,
) -> Result:
    """Call a function in several worker processes of this machine.

    In each worker, `function` creates a `MultiWorkerMirroredStrategy`, its model and
    its data. This works in scripts and notebooks. The output of the first worker, the
    chief, is printed as it arrives. When a worker fails, the others are ended.

    The workers are new interpreters, with the Keras backend of this process. A function
    of the script or notebook is sent to them with the values that it names; others are
    imported. Do not use GPUs before, so that their memory is free.

    Args:
        function: It creates the strategy and the model, and trains.
        args: Its arguments, which must pickle.
        kwargs: Its keyword arguments, likewise.
        workers: The number of workers; `"auto"` for one on each GPU.
        gpus_per_worker: How many GPUs each worker sees. None divides all GPUs evenly.

    Returns:
        What the function returns in the first worker.

    Raises:
        Exception: What the function raises in the worker that failed first, with the
            traceback as a note.
        keras_strategy.testing.WorkerFailed: If a worker ended without an exception,
            with its last output.
        RuntimeError: If this process is itself one of several workers.
        ValueError: If `workers` is not a positive number or "auto", or there are too
            few GPUs.

    Example:

    ```python
    import keras_strategy as ks

    def train(epochs):
        import keras
        import numpy as np

        strategy = ks.MultiWorkerMirroredStrategy()
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("adam", "mse")
        x, y = np.ones((8, 2)), np.ones((8, 1))
        history = model.fit(x, y, batch_size=4, epochs=epochs, verbose=0)
        return history.history["loss"]

    losses = ks.launch(train, (3,), workers=2)
    assert losses[2] < losses[0]
    ```
    """
    resolver = detect().resolver()
    if resolver is not None and find_workers(resolver) is not None:
        raise RuntimeError(
            "`keras_strategy.launch` starts workers, and this process is one already: "
            f"{detect().chosen}. Call the function directly, or start the program "
            "without a launcher."
        )
    count = count_workers(workers, gpus_per_worker)
    limits = os.environ.get("OMP_NUM_THREADS") or thread_limits(count).get(
        "OMP_NUM_THREADS"
    )
    environments = [
        {"OMP_NUM_THREADS": limits, **gpu_variables(rank, count, gpus_per_worker)}
        for rank in range(count)
    ]
    with WorkerRunner(
        count, None, math.inf, environments, grace_seconds=30, streams=True
    ) as runner:
        try:
            return runner.run(function, *args, **(kwargs or {}))[0]
        except WorkerFailed as failure:
            if failure.error is None:
                raise
            raise failure.error from None
