"""The names of `tf.distribute.experimental` that work here."""

from keras_strategy.options.communication import (
    CommunicationImplementation,
    CommunicationOptions,
)
from keras_strategy.options.input import AutoShardPolicy
from keras_strategy.strategies.multi_worker import MultiWorkerMirroredStrategy
from keras_strategy.values.distributed import ValueContext

__all__ = [
    "AutoShardPolicy",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ValueContext",
]
