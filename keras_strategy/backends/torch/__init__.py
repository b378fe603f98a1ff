"""The torch backend."""

from keras_strategy.backends.torch.engine import TorchEngine

engine = TorchEngine()
