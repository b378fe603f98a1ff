"""The distribution of the current strategy and of a model."""

from typing import Any

import keras

from keras_strategy.backends.jax.distribution import ReplicaDistribution
from keras_strategy.rules.ownership import strategy_of_model


def current_distribution() -> Any:
    """Return the active Keras distribution if it belongs to a strategy."""
    distribution = keras.distribution.distribution()
    return distribution if isinstance(distribution, ReplicaDistribution) else None


def strategy_distribution(strategy: Any) -> Any:
    """Return the distribution of a strategy with several devices, or None."""
    if strategy is None:
        return None
    return getattr(strategy.extended.group, "distribution", None)


def multi_worker_distribution(model: Any) -> Any:
    """Return the distribution of a model's strategy if it has several workers."""
    distribution = strategy_distribution(strategy_of_model(model))
    if distribution is None or distribution.cluster is None:
        return None
    return distribution


def home_distribution(model: Any) -> Any:
    """Return the distribution of a model's strategy if it has a home device."""
    distribution = strategy_distribution(strategy_of_model(model))
    return None if distribution is None or distribution.home is None else distribution
