"""The names of `tf.tpu` that work here."""

from keras_strategy.tpu import experimental

__all__ = ["experimental"]
