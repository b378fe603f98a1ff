"""One device, with the interface of many."""

from keras_strategy.core.registry import get_engine
from keras_strategy.strategies.base import Strategy
from keras_strategy.strategies.extended import StrategyExtended
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
        available = get_engine().list_devices(canonical_device(device).split(":")[0])
        super().__init__(StrategyExtended(self, resolve_devices([device], available)))

    def __reduce__(self):
        return type(self), (self.extended.worker_devices[0],)
