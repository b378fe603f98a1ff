"""`Backend` on JAX: devices, gradients, groups of replicas."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import keras

from keras_strategy import hooking
from keras_strategy.backends.jax import devices, gradients

if TYPE_CHECKING:
    from keras_strategy.backends.jax.group import JaxReplicaGroup
    from keras_strategy.strategy import Strategy


class JaxBackend:
    """See `keras_strategy.backends.protocol.Backend`."""

    name = "jax"

    def list_devices(self, device_type: str | None = None) -> list[str]:
        return devices.list_devices(device_type)

    def set_logical_devices(self, device_type: str, count: int) -> None:
        devices.set_logical_devices(count)

    def device_scope(self, device: str) -> AbstractContextManager[Any]:
        return keras.device(device)

    def is_tensor(self, value: Any) -> bool:
        return keras.ops.is_tensor(value)

    def value_and_grad(
        self, fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool
    ) -> Callable[..., Any]:
        return gradients.value_and_grad(fn, variables, has_aux)

    def install_hooks(self) -> None:
        # Here and below: `training.keras_hooks` imports this package while it loads.
        from keras_strategy.backends.jax import keras_hooks

        hooking.install(keras_hooks.hooks())

    def native_strategy(self, devices: tuple[str, ...]) -> Any:
        return keras.distribution.DataParallel(devices=list(devices))

    def distribute_natively(
        self, strategy: Any, datasets: Sequence[Any], split: bool, options: Any
    ) -> None:
        return None  # JAX has no input pipeline

    def require_loop_in_python(self) -> None:
        """Nothing is compiled by its Python source."""

    def create_group(
        self, strategy: "Strategy", devices: tuple[str, ...]
    ) -> "JaxReplicaGroup":
        from keras_strategy.backends.jax.group import JaxReplicaGroup

        return JaxReplicaGroup(strategy, devices)
