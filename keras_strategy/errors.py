"""Exceptions of this package."""


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
