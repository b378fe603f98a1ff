"""The names of `tf.distribute.experimental` that work here."""

from keras_strategy.values import ValueContext

__all__ = ["ValueContext"]
