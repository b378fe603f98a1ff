"""StrategyExtended: the part of a strategy that library authors need."""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import keras

from keras_strategy.backends import get_backend
from keras_strategy.backends.protocol import ReplicaGroup
from keras_strategy.backends.single import SingleReplicaGroup
from keras_strategy.training import keras_hooks

if TYPE_CHECKING:
    from keras_strategy.strategy import Strategy

logger = logging.getLogger("keras_strategy")


class StrategyExtended:
    """The part of a strategy that library authors need.

    Args:
        strategy: The strategy that this belongs to.
        devices: Canonical names of the local devices, one replica each.
    """

    def __init__(self, strategy: "Strategy", devices: Iterable[str]):
        keras_hooks.install_once()
        self._strategy = strategy
        self._devices = tuple(devices)
        if len(self._devices) == 1:
            self.group: ReplicaGroup = SingleReplicaGroup(strategy, self._devices)
        else:
            self.group = get_backend().create_group(strategy, self._devices)
        logger.info(
            "%s: %d replica(s) on %s with the Keras backend '%s'",
            type(strategy).__name__,
            len(self._devices),
            ", ".join(self._devices),
            keras.backend.backend(),
        )

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices on which the replicas compute, such as `"gpu:0"`."""
        return self._devices

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices on which the variables' components are."""
        return self._devices

    def variable_created_in_scope(self, v: keras.Variable) -> bool:
        """Returns whether a variable belongs to this strategy.

        Args:
            v: A variable.

        Raises:
            TypeError: If `v` is not a `keras.Variable`.

        Example:

        ```python
        import keras
        import keras_strategy as ks

        strategy = ks.MirroredStrategy()
        outside = keras.Variable(1.0)
        with strategy.scope():
            inside = keras.Variable(1.0)
        assert strategy.extended.variable_created_in_scope(inside)
        assert not strategy.extended.variable_created_in_scope(outside)
        ```
        """
        if not isinstance(v, keras.Variable):
            raise TypeError(
                "Argument `v` must be a `keras.Variable`. "
                f"Received: v={v!r} of type {type(v).__name__}"
            )
        return keras_hooks.strategy_of_variable(v) is self._strategy
