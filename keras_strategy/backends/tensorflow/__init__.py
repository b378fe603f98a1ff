"""The TensorFlow adapter."""

from keras_strategy.backends.tensorflow.engine import TensorFlowEngine

engine = TensorFlowEngine()
