"""Exceptions and logger of this package, and why some names are TensorFlow's alone."""

import logging

logger = logging.getLogger("keras_strategy")


class WorkerInputError(ValueError):
    """Workers that train together received different data."""


class KerasVersionError(RuntimeError):
    """A Keras function that this package patches has changed."""


class MirrorError(RuntimeError):
    """Components of a mirrored variable differ; see `config.check_mirrored`."""


class UnsupportedBackendError(RuntimeError):
    """The Keras backend in use does not support the feature."""


class ClusterError(RuntimeError):
    """The workers of a cluster did not find each other."""


class WorkersDifferError(RuntimeError):
    """Workers that train together do different work, or hold different values."""


class WorkerFailedError(RuntimeError):
    """The workers of a cluster cannot continue, since one of them failed."""


class WorkerReadError(WorkerInputError, WorkerFailedError):
    """Another worker could not read its data."""


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
