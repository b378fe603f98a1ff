"""Supported names of `tf.distribute.experimental`."""

from typing import TYPE_CHECKING, Any

from keras_strategy import coordinator
from keras_strategy.core.native import native_or_unsupported
from keras_strategy.experimental import old_names, partitioners, rpc
from keras_strategy.experimental.central_storage import CentralStorageStrategy
from keras_strategy.experimental.old_names import (
    MultiWorkerMirroredStrategy,
    TPUStrategy,
)
from keras_strategy.experimental.preemption import (
    PreemptionCheckpointHandler,
    PreemptionWatcher,
)
from keras_strategy.options.communication import (
    CommunicationImplementation,
    CommunicationOptions,
)
from keras_strategy.options.input import AutoShardPolicy
from keras_strategy.options.termination import TerminationConfig
from keras_strategy.values.distributed import ValueContext

if TYPE_CHECKING:
    from keras_strategy.experimental.old_names import CollectiveHints

    CollectiveCommunication = CommunicationImplementation
    ParameterServerStrategy: Any

__all__ = [
    "AutoShardPolicy",
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
    "coordinator",
    "partitioners",
    "rpc",
]


def __getattr__(name: str) -> Any:
    if name in ("CollectiveCommunication", "CollectiveHints"):
        return old_names.deprecated(name)
    if name == "ParameterServerStrategy":
        return native_or_unsupported(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
