"""Distributed training for Keras 3, in the words of `tf.distribute`, on every backend."""

__version__ = "0.1.0"
