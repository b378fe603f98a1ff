"""JAX backend: devices, gradients and replica groups."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.core import Tracer
from keras import tree

from keras_strategy.backends.jax import (
    connection,
    internals,
    patches,
    patches_data,
    training,
)
from keras_strategy.backends.jax.distribution import in_program
from keras_strategy.backends.jax.group import JaxReplicaGroup
from keras_strategy.backends.jax.variables import OVERRIDDEN
from keras_strategy.backends.threads import patches as thread_patches
from keras_strategy.cluster.membership import Cluster
from keras_strategy.core.context import DryRun
from keras_strategy.core.protocols import Engine, Strategy
from keras_strategy.core.step_state import map_rows
from keras_strategy.core.variable_components import ChildScope, unwrap_variables
from keras_strategy.keras_patches import sharded_updates
from keras_strategy.keras_patches.internals import current_stateless_scope
from keras_strategy.keras_patches.random import dry_running
from keras_strategy.keras_patches.variable_classes import check_overridden
from keras_strategy.training.cross_device_ops import CrossDeviceOps
from keras_strategy.values import DistributedValues, raise_not_a_tensor


class GradientScope(ChildScope):
    """Scope of a function whose gradient is computed, and the variables it writes."""

    def __init__(self, values: Iterable[tuple[Any, Any]], parent: Any):
        # Variables that the function creates are initialized outside of the trace.
        super().__init__(values, parent, collect_losses=True)
        self.written: dict[int, Any] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        self.written[id(update[0])] = update[0]
        super().add_update(update)


# Keras converts unknown types with NumPy.
_protocol: Any = DistributedValues
_protocol.__array__ = raise_not_a_tensor


class JaxEngine(Engine):
    name = "jax"
    has_replicas_in_fit = False
    is_tensor: Any = staticmethod(keras.ops.is_tensor)
    static_int: Any = staticmethod(int)
    is_tracing: Any = staticmethod(in_program)
    list_devices: Any = staticmethod(connection.list_devices)
    tpu_coordinates: Any = staticmethod(connection.tpu_coordinates)
    set_logical_devices: Any = staticmethod(connection.set_logical_devices)

    def virtual_replicas_unsupported_reason(self) -> None:
        return None

    def describe_arithmetic(self, is_virtual: bool) -> dict[str, Any]:
        return {"device": jax.devices()[0].device_kind}

    def device_scope(self, device: str) -> AbstractContextManager[Any]:
        # Given a name, Keras would take a device of the first process.
        return keras.device(connection.device_named(device))

    def ones(self, shape: Sequence[Any], like: Any, order: None) -> Any:
        return jnp.ones(shape, like.dtype)

    def dry_run(
        self, fn: Callable[..., Any], args: tuple, kwargs: dict, rows: int
    ) -> DryRun:
        def zeros_with_rows(x):
            return jnp.zeros((rows, *x.shape[1:]), x.dtype)

        def traced():
            new_args, new_kwargs = map_rows(zeros_with_rows, (args, kwargs))
            fn(*new_args, **new_kwargs)

        with dry_running() as result:
            jax.eval_shape(traced)  # shapes are enough
        return result

    def copy_to(self, value: Any, device: str) -> Any:
        target = connection.device_named(device)
        if isinstance(value, Tracer):
            return value
        if isinstance(value, jax.Array):
            for shard in value.addressable_shards:
                if shard.device == target and shard.data.shape == value.shape:
                    is_single = len(value.sharding.device_set) == 1
                    # Copy a variable's shard: the next step may donate it.
                    return shard.data if is_single else jnp.copy(shard.data)
        return jax.device_put(value, target)

    def device_of(self, tensor: Any) -> str | None:
        if isinstance(tensor, Tracer):
            return None
        return connection.name_of(next(iter(jnp.asarray(tensor).devices())))

    def value_and_grad(
        self, fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool
    ) -> Callable[..., Any]:
        def value_and_gradients(*args: Any, **kwargs: Any) -> Any:
            aux: Any = None
            written: list[Any] = []

            def functional(values):
                nonlocal aux, written
                with GradientScope(zip(variables, values, strict=True), scope) as inner:
                    result = fn(*args, **kwargs)
                    value, aux = result if has_aux else (result, None)
                    value = keras.ops.convert_to_tensor(value)
                    aux = unwrap_variables(aux)
                written = list(inner.written.values())
                # Tensors must leave the trace as outputs.
                tensors = [x for x in tree.flatten(aux) if keras.ops.is_tensor(x)]
                return value, (tensors, [inner.state_mapping[id(v)] for v in written])

            scope = current_stateless_scope()
            try:
                (value, (tensors, states)), gradients = jax.value_and_grad(
                    functional, has_aux=True
                )([v.value for v in variables])
            finally:
                if scope is None:
                    internals.initialize_pending()
            # Assignments inside fn have been aggregated already.
            for variable, state in zip(written, states, strict=True):
                internals.write(variable, state)
            if not has_aux:
                return value, gradients
            leaves = iter(tensors)
            aux = tree.map_structure(
                lambda x: next(leaves) if keras.ops.is_tensor(x) else x, aux
            )
            return (value, aux), gradients

        return value_and_gradients

    make_step_function: Any = staticmethod(training.make_step_function)

    def patch_modules(self) -> Sequence[ModuleType]:
        check_overridden(OVERRIDDEN)
        # The patches of threads come last, so that they run before ours.
        return [patches, patches_data, thread_patches, sharded_updates]

    def native_strategy(self, devices: tuple[str, ...]) -> Any:
        return keras.distribution.DataParallel(devices=list(devices))

    connect: Any = staticmethod(connection.connect)

    def create_group(
        self,
        strategy: Strategy,
        devices: tuple[str, ...],
        cross_device_ops: CrossDeviceOps | None,
        cluster: Cluster | None,
    ) -> Any:
        if cross_device_ops is not None:
            cross_device_ops.log_no_effect("jax")
        return JaxReplicaGroup(strategy, devices, cluster)
