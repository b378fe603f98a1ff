"""Supported names of `tf.tpu`."""

from keras_strategy.tpu import experimental

__all__ = ["experimental"]
