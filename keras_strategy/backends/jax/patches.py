"""Patches of Keras on JAX: trainer, variables, optimizers and random numbers."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
from jax.core import Tracer
from keras import tree
from keras.optimizers import LossScaleOptimizer, Optimizer

from keras_strategy.backends.jax import internals
from keras_strategy.backends.jax.distribution import (
    AXIS,
    LOGICAL_PREFIX,
    by_mesh,
    current_distribution,
    put,
    strategy_distribution,
)
from keras_strategy.backends.jax.replica import JaxReplica, TracedMergedScope
from keras_strategy.backends.jax.state import LocalShards
from keras_strategy.backends.jax.training import on_one_device
from keras_strategy.core import context
from keras_strategy.core.context import distributed_replica
from keras_strategy.keras_patches.internals import current_stateless_scope, stored_value
from keras_strategy.keras_patches.patch import (
    find_module,
    hook,
    in_replica,
    model_hook,
    multi_replica_only,
)
from keras_strategy.keras_patches.random import (
    global_generator,
    keras_seeds,
    set_global_generator,
)
from keras_strategy.keras_patches.sharded_updates import ShardedUpdateScope
from keras_strategy.training.ownership import strategy_of_model
from keras_strategy.training.sharding import (
    creating_slots,
    dimension_to_shard,
    is_elementwise,
    mark_as_slot,
)


def _all_variables(model: Any) -> list[Any]:
    variables = [*model.variables, *model.metrics_variables]
    if getattr(model, "optimizer", None) is not None:
        variables += model.optimizer.variables
    return variables


def _wrapping_distribution(model: Any) -> Any:
    """Return the distribution of a model's strategy if its steps need a wrapper."""
    distribution = strategy_distribution(strategy_of_model(model))
    if distribution is None or distribution.home or distribution.per_device:
        return distribution
    return None if distribution.cluster is None else distribution


# The names in different versions of Keras.
_STATE_SHARDING_METHODS = tuple(
    name
    for name in ("_record_training_state_sharding_spec", "_get_state_sharding_spec")
    if hasattr(keras.Model, name)
)


@model_hook(_STATE_SHARDING_METHODS, "(self)", when=_wrapping_distribution)
def _state_sharding(original, distribution, self):
    """Report shardings on all devices for variables that one device holds."""
    # Keras compiles the step for the shardings that it finds before the step.
    if distribution.home is None:
        return original(self)
    variables = [v for v in _all_variables(self) if stored_value(v) is not None]
    arrays = list(map(stored_value, variables))
    internals.set_arrays(variables, distribution.from_home(arrays))
    try:
        return original(self)
    finally:
        internals.set_arrays(variables, arrays)


jax_distribution_lib = find_module(
    "distribute_tensor", "keras.src.backend.jax.distribution_lib"
)


@model_hook(
    "_get_jax_state",
    "(self, trainable_variables=False, non_trainable_variables=False, "
    "optimizer_variables=False, metrics_variables=False, "
    "purge_model_variables=False)",
    when=current_distribution,
)
def _get_jax_state(
    original, distribution, self, purge_model_variables=False, **included
):
    """Copy arrays that two variables share, because a step donates each array."""
    # After a fit with `use_ema`, weights and their moving averages share arrays. JAX
    # cannot donate an array twice (on several devices it crashes), and a variable
    # outside of the step would be left with a deleted array.
    if included.get("optimizer_variables"):
        distribution.on_training()
    if distribution.per_device is not None:  # the variables keep their values
        return tuple([] for is_included in included.values() if is_included)
    seen: dict[int, Any] = {}
    for variable in _all_variables(self):
        other = seen.setdefault(id(variable._value), variable)
        if other is not variable and variable._value is not None:
            variable._value = jnp.copy(variable._value)
    state = original(self, purge_model_variables=purge_model_variables, **included)
    if purge_model_variables:  # Keras would lose the state if the first step fails
        names = (name for name, is_included in included.items() if is_included)
        self._jax_state = dict(zip(names, state, strict=True))
    return state


@model_hook("_get_metrics_result_or_logs", "(self, logs)", when=_wrapping_distribution)
def _get_metrics_result_or_logs(original, distribution, self, logs):
    """Wait for the last step's outputs, which `fit` reads here."""
    if distribution.cluster is not None:
        with distribution.cluster.client.track_operation("the last step"):
            jax.block_until_ready(logs)
    if distribution.per_device is None:
        return original(self, logs)
    with on_one_device(self.metrics_variables):
        return original(self, logs)


@hook(keras.Model, "__call__", "(self, *args, **kwargs)")
def _call(original, self, *args, **kwargs):
    """Move inputs that are committed to other devices to the model's devices."""
    # JAX cannot compute with arrays that are committed to different sets of devices,
    # such as a component of a PerReplica value and a mirrored variable.
    distribution = strategy_distribution(vars(self).get("_ks_strategy"))
    if distribution is not None and distributed_replica() is None:
        args, kwargs = tree.map_structure(distribution.move_committed, (args, kwargs))
    return original(self, *args, **kwargs)


@hook(jax_distribution_lib, "distribute_tensor", "(tensor, layout)")
def _distribute_tensor(original, tensor, layout):
    """Put a variable's value on the devices of all processes."""
    # `jax.device_put` first compares the processes' values, by a collective, and
    # rejects values that already are on all their devices. Its result may share memory
    # with the input, which a step that receives either of them would donate.
    sharding = getattr(layout, "backend_layout", layout)
    # Also applies outside of the scope, where a variable may be assigned.
    is_ours = _is_strategy_sharding(sharding)
    if is_ours and not sharding.is_fully_addressable:
        # A tracer has no `is_fully_addressable`, so check the sharding first.
        if not sharding.is_fully_replicated and getattr(
            tensor, "is_fully_addressable", True
        ):  # take the chief's value
            (chiefs,) = by_mesh[sharding.mesh].workers.broadcast_if_different(
                "the value of a sharded variable", [tensor]
            )
            tensor = tensor if chiefs is None else chiefs
        return put(tensor, sharding)
    result = original(tensor, layout)
    if result is tensor or isinstance(tensor, Tracer):
        return result
    may_share = isinstance(tensor, jax.Array) and (
        is_ours or _is_strategy_sharding(tensor.sharding)
    )
    return jnp.copy(result) if may_share else result


def _is_strategy_sharding(sharding: Any) -> bool:
    first, *others = getattr(getattr(sharding, "mesh", None), "axis_names", ("",))
    return first.startswith(AXIS) and all(
        name.startswith((AXIS, LOGICAL_PREFIX)) for name in others
    )


@hook(
    LossScaleOptimizer,
    "_common_apply",
    "(self, grads, trainable_variables=None)",
    when=in_replica,
)
def _common_apply(original, replica, self, grads, trainable_variables=None):
    """Call `stateless_apply` in `run`, as Keras's trainer does."""
    # Keras's code would assign variables inside of a `lax.cond`, which JAX forbids. The
    # gradients are already summed here.
    trainable = list(trainable_variables or self._trainable_variables)
    values, states = self.stateless_apply(
        [v.value for v in self.variables], list(grads), [v.value for v in trainable]
    )
    updated = [*trainable, *self.variables]
    for variable, value in zip(updated, [*values, *states], strict=True):
        internals.write(variable, value)


@hook(keras_seeds, "global_seed_generator", "()", when=current_distribution)
def _global_seed_generator(original, distribution):
    """Create the global seed generator outside of the strategy."""
    # In the scope it would be placed on the strategy's devices, where every other model
    # would find it. Keras refuses to use it inside of a trace, where its state would
    # become a constant; `run` passes it to the program like any variable.
    if distributed_replica() is not None:
        generator = global_generator()
        if generator is None:
            with context.cross_replica_scope(None):
                generator = keras.random.SeedGenerator()
            set_global_generator(generator)
        return generator
    keras.distribution.set_distribution(None)
    try:
        with context.cross_replica_scope(None):
            return original()
    finally:
        keras.distribution.set_distribution(distribution)


@multi_replica_only
def _slot_sharding_distribution() -> Any:
    """Return the current distribution if it shards optimizer slots."""
    distribution = current_distribution()
    return distribution if distribution is not None and distribution.shard else None


@hook(Optimizer, "add_variable", ("shape",), when=_slot_sharding_distribution)
def _add_variable(original, distribution, self, *args, **kwargs):
    """Shard optimizer slots when they are created."""
    # No device ever holds a whole slot. Keras would give it the layout of its weight.
    with creating_slots(kwargs.pop("layout", None)):
        variable = original(self, *args, **kwargs)
    mark_as_slot(variable)
    return variable


class _ShardsScope(ShardedUpdateScope):
    def __init__(
        self,
        shards: LocalShards,
        dims: dict[int, int],  # the sharded dimension of each variable, by its `id`
        variables: Sequence[Any],
        gradient_dims: Sequence[int | None],  # None if a gradient is not sharded
    ):
        parent = current_stateless_scope()
        values = {
            id(v): shards.shard(parent.get_current_value(v), dims[id(v)])
            for v in variables
        }
        super().__init__(parent, values, variables)
        self.written: dict[int, Any] = {}
        self._gradient_dims = gradient_dims

    def write(self, variable: Any, value: Any) -> None:
        self.shards[id(variable)] = value
        self.written[id(variable)] = variable

    def squared_norms(self, squares: Sequence[Any]) -> tuple[list[Any], Any]:
        is_first = jax.lax.axis_index(AXIS) == 0
        pairs = zip(squares, self._gradient_dims, strict=True)
        # Count gradients that are not sharded once.
        local = [x if d is not None else jnp.where(is_first, x, 0) for x, d in pairs]
        totals = jax.lax.psum(jnp.stack(local), AXIS)
        return list(totals), jnp.sum(totals)


@multi_replica_only
def _updated_shards(optimizer: Any) -> LocalShards | None:
    """Return the local shards if each replica updates its shard of the weights."""
    replica = distributed_replica()
    if not isinstance(replica, JaxReplica) or not is_elementwise(optimizer):
        return None
    scope = current_stateless_scope()
    return None if isinstance(scope, TracedMergedScope) else replica.shards


@hook(
    Optimizer,
    "_backend_apply_gradients",
    "(self, grads, trainable_variables)",
    when=_updated_shards,
)
def _apply_gradients(original, shards, self, grads, trainable_variables):
    """Update only this replica's shard of the weights in `run`, with Keras's code."""
    # This needs only the local shards of the summed gradients and of the optimizer
    # slots. Optimizers that are not elementwise update whole variables.
    weights = [v for v in self._trainable_variables if not v.overwrite_with_gradient]
    dims, variables = {}, []
    for variable in (*weights, *self.variables):
        dim = dimension_to_shard(variable.shape, shards.replicas)
        if dim is not None:
            dims[id(variable)] = dim
            variables.append(variable)
    gradient_dims = [dims.get(id(v)) for v in trainable_variables]
    grads = list(map(shards.shard, grads, gradient_dims))
    scope = _ShardsScope(shards, dims, variables, gradient_dims)
    with scope, scope.shapes():
        original(self, grads, trainable_variables)
    for variable in scope.written.values():
        value = scope.get_current_value(variable)
        internals.write(variable, shards.gather(value, dims[id(variable)]))
