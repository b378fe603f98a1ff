"""Which distribution is in charge: of the devices, and of a model."""

from typing import Any

import keras

from keras_strategy.rules.ownership import strategy_of_model


def distribution_in_charge() -> Any:
    """The distribution of the strategy that is in charge of the devices."""
    distribution = keras.distribution.distribution()
    return distribution if hasattr(distribution, "place") else None


def distribution_of_model(model: Any) -> Any:
    """The distribution of the strategy that a model trains under."""
    return distribution_of_strategy(strategy_of_model(model))


def distribution_of_strategy(strategy: Any) -> Any:
    """The distribution of a strategy, if there is one and it has several devices."""
    if strategy is None:
        return None
    return getattr(strategy.extended.group, "distribution", None)


def distribution_of_workers(model: Any) -> Any:
    """The distribution of a model's strategy, if it is of several workers."""
    distribution = distribution_of_model(model)
    if distribution is None or distribution.cluster is None:
        return None
    return distribution


def distribution_from_home(model: Any) -> Any:
    """The distribution of a model's strategy, if one device keeps the variables."""
    distribution = distribution_of_model(model)
    return None if distribution is None or distribution.home is None else distribution
