"""The names of `tf.distribute.experimental` that work here."""

from keras_strategy.communication import (
    CommunicationImplementation,
    CommunicationOptions,
)
from keras_strategy.strategies.multi_worker import MultiWorkerMirroredStrategy
from keras_strategy.values import ValueContext

__all__ = [
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ValueContext",
]
