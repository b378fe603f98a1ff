"""Strategies: each is a choice of devices."""

import keras_strategy.strategies.mirrored  # noqa: F401 (registers the default strategy)
