"""The replicas of one strategy, on a mesh of JAX devices."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from keras_strategy.backends.jax import keras_hooks, on_read
from keras_strategy.backends.jax.distribution import ReplicaDistribution
from keras_strategy.backends.jax.runner import Runner
from keras_strategy.backends.jax.sharded import gathered, placed, reduced, shards
from keras_strategy.values import DistributedValues, ReduceOp
from keras_strategy.variables import is_on_read

if TYPE_CHECKING:
    from keras_strategy.strategy import Strategy


class JaxReplicaGroup:
    """See `keras_strategy.backends.protocol.ReplicaGroup`."""

    def __init__(self, strategy: "Strategy", devices: tuple[str, ...]):
        self.devices = devices
        self.distribution = ReplicaDistribution(devices)
        self._runner = Runner(strategy, devices, self.distribution)

    def scope(self) -> AbstractContextManager[Any]:
        return self.distribution.scope()

    def adopt(self, variables: Sequence[Any]) -> None:
        for variable in variables:
            if not keras_hooks.is_global_seed(variable):
                layout = self.distribution.replicated_layout(len(variable.shape))
                keras_hooks.set_layout(variable, layout)

    def components(self, variable: Any) -> tuple[Any, ...]:
        if is_on_read(variable):
            stacked = on_read.locals_of(variable, self.distribution)
            return tuple(part[0] for part in shards(stacked, self.distribution))
        array = keras_hooks.array_of(variable)
        # Copies, since the next step overwrites the variable's own buffers.
        return tuple(jnp.copy(part) for part in shards(array, self.distribution))

    def run(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        return self._runner.run(fn, args, kwargs)

    def reduce(self, reduce_op: ReduceOp, value: DistributedValues, axis: Any) -> Any:
        return reduced(reduce_op, value, axis, self.distribution)

    def gather(self, values: Sequence[Any], axis: int) -> Any:
        return gathered(values, axis, self.distribution)

    def place(self, parts: Sequence[Any]) -> Any:
        return placed(parts, self.distribution)
