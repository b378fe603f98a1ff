"""The strategy that is in charge outside every scope."""

import contextlib

import keras

from keras_strategy.backends.single import SingleReplicaGroup
from keras_strategy.core import context
from keras_strategy.core.components import ComponentOwners
from keras_strategy.core.registry import get_engine
from keras_strategy.rules.ownership import strategy_of_variable
from keras_strategy.strategies.base import Strategy
from keras_strategy.strategies.extended import StrategyExtended, check_variable
from keras_strategy.values.topology import ReplicaTopology


class DefaultStrategy(Strategy):
    """What is in charge outside every scope: one replica, where Keras puts it."""

    def __init__(self):
        super().__init__(DefaultExtended(self))

    def __reduce__(self):
        return type(self), ()


class DefaultExtended(StrategyExtended):
    """Installs no hooks and asks for no device, so that a process may just look."""

    def __init__(self, container_strategy: Strategy):
        self._strategy = container_strategy
        self.cluster = None
        self.custom_reducer = None
        self._devices = ("",)  # which one is asked for when somebody wants to know
        self.topology = ReplicaTopology(self._devices)
        self._containers = ComponentOwners()
        self.group = DefaultGroup(container_strategy, ())

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The device that the backend takes by itself."""
        return (get_engine().list_devices()[0],)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The same."""
        return self.worker_devices

    def variable_created_in_scope(self, v: keras.Variable) -> bool:
        """Whether a variable was made outside of every scope."""
        check_variable("v", v)
        return strategy_of_variable(v) is None


class DefaultGroup(SingleReplicaGroup):
    """Leaves the choice of the device to Keras."""

    def scope(self):
        """Changes nothing."""
        return contextlib.nullcontext()


context.register_default_strategy(DefaultStrategy)
