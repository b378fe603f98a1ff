"""One device, with the interface of many."""

import contextlib

import keras

from keras_strategy.backends.single import SingleReplicaGroup
from keras_strategy.core.components import Containers
from keras_strategy.core.registry import get_backend
from keras_strategy.rules.ownership import strategy_of_variable
from keras_strategy.strategies.base import Strategy
from keras_strategy.strategies.extended import StrategyExtended, check_variable
from keras_strategy.values.devices import canonical_device, resolve_devices


class OneDeviceStrategy(Strategy):
    """Puts variables and computation on one device, and changes nothing else.

    It is what a program that is written for strategies runs on while it is
    developed. `run` returns what the function returned.

    Args:
        device: A device's name, such as `"cpu:0"` or `"/gpu:1"`.

    Raises:
        ValueError: If there is no such device.

    Example:

    ```python
    import keras_strategy as ks

    strategy = ks.OneDeviceStrategy("cpu:0")
    assert strategy.num_replicas_in_sync == 1
    assert strategy.run(lambda: 3) == 3
    ```
    """

    def __init__(self, device: str):
        available = get_backend().list_devices(canonical_device(device).split(":")[0])
        super().__init__(StrategyExtended(self, resolve_devices([device], available)))

    def __reduce__(self):
        return type(self), (self.extended.worker_devices[0],)


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
        self._devices = ("",)  # which one is asked for when somebody wants to know
        self._containers = Containers()
        self.group = DefaultGroup(container_strategy, ())

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The device that the backend takes by itself."""
        return (get_backend().list_devices()[0],)

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
