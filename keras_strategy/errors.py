"""Exceptions and logger of this package, and why some names are TensorFlow's alone."""

import logging

logger = logging.getLogger("keras_strategy")


class WorkerInputError(ValueError):
    """Workers that train together received different data.

    Example:

    ```python
    import numpy as np
    import keras_strategy as ks

    strategy = ks.MultiWorkerMirroredStrategy()
    try:
        for batch in strategy.experimental_distribute_dataset([np.ones((4, 2))]):
            ...
    except ks.errors.WorkerInputError as error:
        print("batches differ:", error)
    ```
    """


class KerasVersionError(RuntimeError):
    """A Keras function that this package patches has changed.

    Example:

    ```python
    import keras_strategy as ks

    try:
        strategy = ks.MirroredStrategy()
    except ks.errors.KerasVersionError as error:
        raise SystemExit(f"Install another Keras: {error}")
    ```
    """


class MirrorError(RuntimeError):
    """Components of a mirrored variable differ; see `config.check_mirrored`.

    Example:

    ```python
    import keras_strategy as ks

    ks.config.check_mirrored(True)  # from now on a difference raises MirrorError
    ks.config.check_mirrored(False)
    ```
    """


class UnsupportedBackendError(RuntimeError):
    """The Keras backend in use does not support the feature.

    Example:

    ```python
    import keras
    import keras_strategy as ks

    if keras.backend.backend() != "tensorflow":
        try:
            ks.Server({"worker": ["localhost:2222"]})
        except ks.errors.UnsupportedBackendError as error:
            assert "keras-strategy run" in str(error)
    ```
    """


class ClusterError(RuntimeError):
    """The workers of a cluster did not find each other.

    Example:

    ```python
    import keras_strategy as ks

    try:
        strategy = ks.MultiWorkerMirroredStrategy()
    except ks.errors.ClusterError as error:
        print("not all workers have arrived:", error)
        raise
    ```
    """


class WorkersDifferError(RuntimeError):
    """Workers that train together do different work, or hold different values.

    Example:

    ```python
    import keras
    import numpy as np
    import keras_strategy as ks

    with ks.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    try:
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    except ks.errors.WorkersDifferError as error:
        print("not the same program:", error)
        raise
    ```
    """


class WorkerFailedError(RuntimeError):
    """The workers of a cluster cannot continue, since one of them failed.

    Example:

    ```python
    import keras
    import keras_strategy as ks

    strategy = ks.MultiWorkerMirroredStrategy()
    ones = strategy.run(lambda: keras.ops.ones(2))
    try:
        total = strategy.reduce("sum", ones, axis=None)
    except ks.errors.WorkerFailedError as error:
        print("start again from the last checkpoint:", error)
        raise
    ```
    """


class WorkerReadError(WorkerInputError, WorkerFailedError):
    """Another worker could not read its data.

    Example:

    ```python
    import keras_strategy as ks

    # Both handlers of data and of failed workers catch it.
    assert issubclass(ks.errors.WorkerReadError, ks.errors.WorkerInputError)
    assert issubclass(ks.errors.WorkerReadError, ks.errors.WorkerFailedError)
    ```
    """


_ASYNCHRONOUS = (
    "Workers update parameter servers asynchronously. Only TensorFlow implements that, "
    "and results differ from one device. Use MirroredStrategy or "
    "MultiWorkerMirroredStrategy, with `shard` if the model is too large for one "
    "device; or coordinator.ClusterCoordinator for asynchronous functions."
)
_SERVERS = (
    "JAX and torch have no servers that accept work. Workers find each other when "
    "MultiWorkerMirroredStrategy is created; `keras-strategy run` starts them. "
    "coordinator.ClusterCoordinator starts its own workers."
)
_CALLS = (
    "It calls TensorFlow functions, with their types, in another process, which only "
    "TensorFlow implements. Use coordinator.ClusterCoordinator, which starts its "
    "workers; or gRPC between your own programs."
)
# Names of tf.distribute that only TensorFlow has, and the reasons.
TENSORFLOW_ONLY = {
    "ParameterServerStrategy": _ASYNCHRONOUS,
    "Server": _SERVERS,
    "experimental.rpc.Client": _CALLS,
    "experimental.rpc.Server": _CALLS,
}
