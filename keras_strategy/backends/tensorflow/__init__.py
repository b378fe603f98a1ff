"""The TensorFlow adapter."""

from keras_strategy.backends.tensorflow.engine import TensorFlowBackend

backend = TensorFlowBackend()
