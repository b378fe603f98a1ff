"""The names of `tf.distribute.experimental` that work here."""

from keras_strategy.communication import (
    CommunicationImplementation,
    CommunicationOptions,
)
from keras_strategy.input_options import AutoShardPolicy
from keras_strategy.strategies.multi_worker import MultiWorkerMirroredStrategy
from keras_strategy.values import ValueContext

__all__ = [
    "AutoShardPolicy",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ValueContext",
]
