"""The strategies: each is a choice of devices and a few lines."""

import keras_strategy.strategies.mirrored  # noqa: F401 (it is in charge from now on)
