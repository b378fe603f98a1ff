"""The replicas of one strategy on a mesh of JAX devices."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras import tree

from keras_strategy.backends.jax import patches_state as keras_state
from keras_strategy.backends.jax.collectives import JaxWorkers, gather, reduce
from keras_strategy.backends.jax.distribution import (
    LogicalDistribution,
    ReplicaDistribution,
    in_program,
    put,
)
from keras_strategy.backends.jax.replica import (
    TracedMirrored,
    TracedPerReplica,
    component_of,
    local_component,
    write_component,
)
from keras_strategy.backends.jax.run import Runner
from keras_strategy.backends.jax.state import (
    gather_variable,
    no_value_error,
    replica_values,
    set_components,
)
from keras_strategy.backends.jax.values import ShardedPerReplica, local_shards, place
from keras_strategy.backends.threads.patches import current_stateless_scope
from keras_strategy.backends.threads.scopes import MergedScope
from keras_strategy.core.per_replica_attributes import setattr_hooks
from keras_strategy.core.registry import get_engine
from keras_strategy.core.variable_components import (
    VariableComponent,
    unwrap_variables,
    update_components,
)
from keras_strategy.training import ownership
from keras_strategy.training.variable_sync import is_sync_on_read
from keras_strategy.values import DistributedValues, Mirrored, PerReplica, ReduceOp

if TYPE_CHECKING:
    from keras_strategy.cluster.membership import Cluster
    from keras_strategy.core.protocols import Strategy
    from keras_strategy.options import RunOptions


class JaxReplicaGroup:
    """Implementation of `core.protocols.ReplicaGroup`."""

    def __init__(
        self,
        strategy: "Strategy",
        devices: tuple[str, ...],
        cluster: "Cluster | None",
    ):
        self._strategy = strategy
        self.devices = devices
        self.distribution = (
            ReplicaDistribution(
                devices, cluster, strategy.shard, strategy.parameter_device
            )
            if strategy.logical_devices is None
            else LogicalDistribution(strategy.logical_devices, cluster, strategy.shard)
        )
        self.workers = (
            None if cluster is None else JaxWorkers(cluster, self.distribution)
        )
        self.distribution.workers = self.workers
        self._runner = Runner(strategy, self.distribution)

    def scope(self) -> AbstractContextManager[Any]:
        return self.distribution.scope()

    def adopt(self, variables: Sequence[Any]) -> None:
        variables = [v for v in variables if not keras_state.is_global_seed(v)]
        for variable in variables:
            layout = self.distribution.get_variable_layout(variable)
            keras_state.set_layout(variable, layout)
        ownership.broadcast_from_chief(self._strategy, variables)

    def sync_initial_values(self, variables: Sequence[Any]) -> int:
        if self.workers is None or not variables:
            return len(variables)
        # Sharded variables received the chief's value when they were created.
        arrays = [
            np.asarray(array) if array.is_fully_replicated else np.zeros(0)
            for array in keras_state.arrays_of(variables)
        ]
        chiefs = self.workers.broadcast_if_different(
            "the first values of variables", arrays
        )
        for variable, value in zip(variables, chiefs, strict=False):
            if value is not None:
                keras_state.set_array(
                    variable, put(value, self.distribution.everywhere)
                )
        return len(chiefs)

    @contextlib.contextmanager
    def trainer_scope(
        self, model: Any, method: str, arguments: dict[str, Any]
    ) -> Iterator[None]:
        if method in ("fit", "train_on_batch"):
            self._check_no_custom_sums(method)
        if method in ("fit", "evaluate", "predict"):
            setattr_hooks.end()  # replicas take turns in `run` only
        if method == "predict_on_batch":
            # Keras does not distribute this batch.
            arguments["x"] = self.distribution.place_batch(arguments["x"])
        try:
            yield
        except BaseException:
            if method in ("evaluate", "predict"):
                # Keras takes the values out of the variables during the loop. Only
                # `fit` restores them after an exception.
                keras_state.synchronize_state(model)
            raise

    def _check_no_custom_sums(self, method: str) -> None:
        if self._strategy.extended.custom_reducer is not None:
            raise RuntimeError(
                f"`{method}` on JAX is one program over all devices, in which XLA sums "
                "the gradients: your `cross_device_ops` would not be called. Train "
                "with `strategy.run` (a custom loop), use torch or TensorFlow, or omit "
                "`cross_device_ops`."
            )

    def check_cross_replica_apply(self) -> None:
        pass

    def components(self, variable: Any) -> tuple[Any, ...]:
        if in_program():
            return self.per_replica_value(variable).values
        scope = current_stateless_scope()
        if isinstance(scope, MergedScope):
            return tuple(scope.components(variable))
        ownership.broadcast_pending_values()
        if is_sync_on_read(variable):
            stacked = replica_values(variable, self.distribution)
            return tuple(x[0] for x in local_shards(stacked, self.distribution))
        array = keras_state.array_of(variable)
        if not array.sharding.is_fully_replicated:
            array = gather_variable(variable, self.distribution)
            return local_shards(array, self.distribution)
        if self.distribution.home is not None:
            array = put(array, self.distribution.everywhere)
        # Copied, because the next step donates the variable's array.
        return tuple(map(jnp.copy, local_shards(array, self.distribution)))

    def local_bytes(self, variable: Any) -> tuple[int, ...]:
        array = keras_state.array_of(variable)
        if array is None:
            raise no_value_error(variable)
        by_device = {s.device: s.data.nbytes for s in array.addressable_shards}
        return tuple(by_device.get(device, 0) for device in self.distribution.devices)

    def per_replica_value(self, variable: Any) -> PerReplica:
        if in_program():
            return TracedPerReplica(component_of(variable))
        return PerReplica(self.components(variable))

    def assign_components(self, variable: Any, values: Sequence[Any]) -> None:
        # Copied: a value may be a shard of another variable, which the next step
        # donates.
        devices = self.distribution.devices
        values = [
            jnp.copy(jax.device_put(value, device))
            for value, device in zip(values, devices, strict=True)
        ]
        scope = current_stateless_scope()
        if isinstance(scope, MergedScope):
            scope.assign_components(variable, values)
            return
        ownership.broadcast_pending_values()
        set_components(variable, values, self.distribution)

    def update(
        self, variable: Any, fn: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Any:
        if not in_program():
            return update_components(self, variable, fn, args, kwargs)
        # One trace serves all replicas: its component stands for all.
        components: dict[int, VariableComponent] = {}

        def argument(leaf):
            if not isinstance(leaf, keras.Variable):
                return local_component(leaf)
            if id(leaf) not in components:
                components[id(leaf)] = VariableComponent(
                    leaf, component_of(leaf), ", ".join(self.devices)
                )
            return components[id(leaf)]

        component = argument(variable)
        args, kwargs = tree.map_structure(argument, (args, kwargs))
        result = unwrap_variables(fn(component, *args, **kwargs))
        for component in components.values():
            if component.assigned:
                write_component(component.container, component.value)
        return tree.map_structure(
            lambda leaf: TracedMirrored(leaf) if keras.ops.is_tensor(leaf) else leaf,
            result,
        )

    def mirror(self, value: Any) -> Mirrored:
        value = keras.ops.convert_to_tensor(value)
        if in_program():
            return TracedMirrored(value)
        return Mirrored([get_engine().copy_to(value, name) for name in self.devices])

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple,
        kwargs: dict,
        options: "RunOptions",
        scope: Callable[[], AbstractContextManager[Any]],
    ) -> Any:
        compiled = options.compile is not False
        result = self._runner.run(fn, args, kwargs, compiled, scope)
        return result if self.distribution.replicas > 1 else self._unwrap_single(result)

    def _unwrap_single(self, result: Any) -> Any:
        """Unwrap the output of a single replica with several devices."""

        def unwrap(x):
            if not isinstance(x, ShardedPerReplica):
                return x.values[0] if isinstance(x, PerReplica) else x
            return x.array[0] if x.scalars else x.array  # on all its devices

        return tree.map_structure(unwrap, result)

    def reduce(self, reduce_op: ReduceOp, value: DistributedValues, axis: Any) -> Any:
        result = reduce(reduce_op, value, axis, self.distribution, self.workers)
        return self.distribution.to_home(result)  # next to the variables

    def gather(self, values: Sequence[Any], axis: int) -> Any:
        result = gather(values, axis, self.distribution, self.workers)
        return self.distribution.to_home(result)

    def place(self, parts: Sequence[Any], alike: bool | None = None) -> Any:
        result = place(parts, self.distribution, alike)
        return result if self.distribution.replicas > 1 else self._unwrap_single(result)

    def shard_tensor(self, tensor: Any, parts: Sequence[int]) -> Any:
        assert isinstance(self.distribution, LogicalDistribution)
        return self.distribution.constrain(tensor, parts)
