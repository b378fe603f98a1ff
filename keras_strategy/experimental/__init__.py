"""Supported names of `tf.distribute.experimental`."""

from typing import TYPE_CHECKING, Any

from keras_strategy import coordinator
from keras_strategy.core.registry import native_or_unsupported
from keras_strategy.experimental import partitioners, rpc, strategies
from keras_strategy.experimental.preemption import (
    PreemptionCheckpointHandler,
    PreemptionWatcher,
)
from keras_strategy.experimental.strategies import (
    CentralStorageStrategy,
    MultiWorkerMirroredStrategy,
    TPUStrategy,
)
from keras_strategy.options import (
    AutoShardPolicy,
    CommunicationImplementation,
    CommunicationOptions,
    TerminationConfig,
)
from keras_strategy.values import ValueContext

if TYPE_CHECKING:
    from keras_strategy.experimental.strategies import CollectiveHints

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
        return strategies.deprecated(name)
    if name == "ParameterServerStrategy":
        return native_or_unsupported(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
