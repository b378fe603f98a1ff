"""The torch adapter."""

from keras_strategy.backends.torch.engine import TorchBackend

backend = TorchBackend()
