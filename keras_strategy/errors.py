"""The exceptions that only this package raises."""


class WorkerInputError(ValueError):
    """Workers that train together were given different data."""


class KerasVersionError(RuntimeError):
    """A function of Keras that this package extends is not the one it knows."""


class MirrorError(RuntimeError):
    """The components of a mirrored variable differ; see `config.check_mirrored`."""


class UnsupportedBackendError(RuntimeError):
    """The Keras backend in use cannot train on several devices."""


class ClusterError(RuntimeError):
    """The workers of a cluster did not come together."""


class WorkersDifferError(RuntimeError):
    """Workers that train together train something else, or hold other values."""


class WorkerFailedError(RuntimeError):
    """The workers of a cluster cannot go on together, since one of them failed."""


class WorkerReadError(WorkerInputError, WorkerFailedError):
    """Another worker could not read its data."""
