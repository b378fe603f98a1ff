"""The replicas of one strategy, on a mesh of JAX devices."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from keras_strategy.backends.jax import keras_hooks
from keras_strategy.backends.jax.distribution import ReplicaDistribution

if TYPE_CHECKING:
    from keras_strategy.strategy import Strategy


class JaxReplicaGroup:
    """See `keras_strategy.backends.protocol.ReplicaGroup`."""

    def __init__(self, strategy: "Strategy", devices: tuple[str, ...]):
        self.devices = devices
        self.distribution = ReplicaDistribution(devices)
        self._strategy = strategy

    def scope(self) -> AbstractContextManager[Any]:
        return self.distribution.scope()

    def adopt(self, variables: Sequence[Any]) -> None:
        for variable in variables:
            if not keras_hooks.is_global_seed(variable):
                layout = self.distribution.replicated_layout(len(variable.shape))
                keras_hooks.set_layout(variable, layout)

    def components(self, variable: Any) -> tuple[Any, ...]:
        return self.shards(keras_hooks.array_of(variable))

    def shards(self, array: Any) -> tuple[Any, ...]:
        """What each device holds of an array, in the order of the replicas."""
        by_device = {shard.device: shard.data for shard in array.addressable_shards}
        return tuple(by_device[device] for device in self.distribution.devices)

    def run(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        raise NotImplementedError
