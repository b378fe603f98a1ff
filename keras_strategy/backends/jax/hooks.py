"""Where the JAX adapter extends Keras, beside `keras_strategy/hooks`."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import keras
from jax.core import Tracer
from keras import tree

from keras_strategy.backends.jax import hooks_state as keras_state
from keras_strategy.backends.jax import marks
from keras_strategy.backends.jax.distribution import AXIS, LOGICAL, distribution_of, put
from keras_strategy.backends.jax.hooks_home import step_from_home
from keras_strategy.backends.jax.in_charge import (
    distribution_from_home,
    distribution_in_charge,
    distribution_of_strategy,
    distribution_of_workers,
)
from keras_strategy.backends.jax.own_rows import OwnOnDevices, own_part
from keras_strategy.backends.threads.hooks import global_state, keras_seeds
from keras_strategy.core import context
from keras_strategy.core.context import distributed_replica
from keras_strategy.hooks.conditions import in_replica, in_scope_of_workers
from keras_strategy.hooks.hook import home_of, hook, model_hook
from keras_strategy.rules import first_values

jax_trainer = home_of(
    "JAXEpochIterator _distribute_data", "keras.src.backend.jax.trainer"
)
jax_distribution_lib = home_of(
    "distribute_tensor", "keras.src.backend.jax.distribution_lib"
)


def _distribution_around_steps(model: Any) -> Any:
    """The distribution of a model's strategy, if a step needs something around it."""
    return distribution_of_workers(model) or distribution_from_home(model)


# --- the trainer


@model_hook(
    "_get_jax_state",
    "(self, trainable_variables=False, non_trainable_variables=False, "
    "optimizer_variables=False, metrics_variables=False, "
    "purge_model_variables=False)",
    when=distribution_in_charge,
)
def _get_jax_state(original, ours, self, purge_model_variables=False, **taken):
    """No two variables share an array that a step overwrites.

    Weights and their moving average do after a fit with `use_ema`. JAX cannot donate
    an array twice (on several devices that crashes), and the variable that does not
    take part in the step would be left with a deleted one.

    And the state that it takes out of the variables is noted, since Keras forgets it
    where the first step fails, and the model with it.
    """
    if taken.get("optimizer_variables"):
        ours.training()
    variables = [*self.variables, *self.metrics_variables]
    if getattr(self, "optimizer", None) is not None:
        variables += self.optimizer.variables
    seen: dict[int, Any] = {}
    for variable in variables:
        other = seen.setdefault(id(variable._value), variable)
        if other is not variable and variable._value is not None:
            variable._value = jax.numpy.copy(variable._value)
    state = original(self, purge_model_variables=purge_model_variables, **taken)
    if purge_model_variables:
        names = (name for name, wanted in taken.items() if wanted)
        self._jax_state = dict(zip(names, state, strict=True))
    return state


@model_hook(
    ("make_train_function", "make_test_function", "make_predict_function"),
    "(self, force=False)",
    when=_distribution_around_steps,
)
def _make_function(original, distribution, self, force=False):
    """Workers wait for each other in what it makes.

    And what that returns is brought to all of them, since Keras or a callback reads it.
    Where one device keeps the variables, a step begins and ends with them there.
    """
    kind = original.__name__.split("_")[1]
    before = getattr(self, f"{kind}_function")
    result = original(self, force)
    made = getattr(self, f"{kind}_function")
    if made is not before:
        if distribution.home is None:
            step = _step_of_workers(made, kind, distribution)
        else:
            step = step_from_home(made, distribution)
        setattr(self, f"{kind}_function", step)
    return result


def _step_of_workers(step: Callable, kind: str, distribution: Any) -> Callable:
    member = distribution.cluster.member
    previous: list[Any] = []

    def function(state, iterator):
        with member.waiting(f"the {kind} step"):
            # Python prepares one step while the devices do another.
            jax.block_until_ready(previous)
            outputs, state = step(state, iterator)
            own = isinstance(iterator, OwnOnDevices) and iterator.taken()
            if own and kind == "predict":
                part = functools.partial(own_part, distribution, own)
                outputs = tree.map_structure(part, outputs)
            else:
                outputs = tree.map_structure(readable, outputs)
            previous[:] = [outputs]
            if kind == "predict" or distribution.one_at_a_time:
                jax.block_until_ready(outputs)
        return outputs, state

    def readable(x):
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return put(x, distribution.everywhere)
        return x

    return function


@model_hook("_get_metrics_result_or_logs", "(self, logs)", when=distribution_of_workers)
def _get_metrics_result_or_logs(original, distribution, self, logs):
    """Here `fit` reads what the last step gave."""
    with distribution.cluster.member.waiting("the last step"):
        jax.block_until_ready(logs)
    return original(self, logs)


@hook(keras.Model, "__call__", "(self, *args, **kwargs)")
def _call(original, self, *args, **kwargs):
    """An input committed to other devices is moved to the model.

    JAX refuses to compute with arrays that are bound to different sets of devices,
    such as a component of a PerReplica value and a variable of all replicas.
    """
    distribution = distribution_of_strategy(vars(self).get("_ks_strategy"))
    if distribution is not None and distributed_replica() is None:
        args, kwargs = tree.map_structure(distribution.place, (args, kwargs))
    return original(self, *args, **kwargs)


# --- variables and optimizers


@hook(jax_distribution_lib, "distribute_tensor", "(tensor, layout)")
def _distribute_tensor(original, tensor, layout):
    """A variable's value is put on the devices of all processes.

    `jax.device_put` first compares what the processes have, by a collective; and it
    cannot take what is on all their devices already. Where it moves an array, the
    result may share memory with it, which a step overwrites that has either of them.
    """
    sharding = getattr(layout, "backend_layout", layout)
    # Also outside of the scope, where a variable may be assigned.
    ours = _is_ours(sharding)
    if ours and not sharding.is_fully_addressable:
        return put(_chiefs(tensor, sharding), sharding)
    result = original(tensor, layout)
    if result is tensor or isinstance(tensor, Tracer):
        return result
    if isinstance(tensor, jax.Array) and (ours or _is_ours(tensor.sharding)):
        return jax.numpy.copy(result)
    return result


def _chiefs(tensor: Any, sharding: Any) -> Any:
    """What is to be split, as the chief has it: each worker keeps its part of that."""
    if sharding.is_fully_replicated or not getattr(tensor, "is_fully_addressable", 1):
        return tensor
    workers = distribution_of(sharding).workers
    (chiefs,) = workers.take_chiefs("the value of a variable that is split", [tensor])
    return tensor if chiefs is None else chiefs


def _is_ours(sharding: Any) -> bool:
    first, *others = getattr(getattr(sharding, "mesh", None), "axis_names", ("",))
    return first.startswith(AXIS) and all(
        name.startswith((AXIS, LOGICAL)) for name in others
    )


@hook(keras.Variable, "_initialize", "(self, value)", when=in_scope_of_workers)
def _initialize(original, strategy, self, value):
    """The first value is the chief's on every worker."""
    original(self, value)
    if not isinstance(self._value, Tracer):
        first_values.note(strategy, self)


@hook(
    keras.Variable,
    "_initialize_with_initializer",
    "(self, initializer)",
    when=in_scope_of_workers,
)
def _initialize_with_initializer(original, strategy, self, initializer):
    """The first value of a very large variable is the chief's, too.

    Keras has each process draw its parts of it in a program of its own, which has that
    process's seed. An initializer that takes the layout says itself what it does.
    """
    if "layout" in inspect.signature(initializer).parameters:
        original(self, initializer)
        return
    value = initializer(self._shape, dtype=self._dtype)
    self._initialize(self._convert_to_tensor(value))


@hook(keras.Variable, "value", None)
def _value(original, self):
    """Who reads an array may keep it, so no program overwrites it.

    And a first value that is read is the chief's on every worker.
    """
    if first_values.waiting and keras_state.stateless_scope() is None:
        first_values.settle()
    marks.lend(self)
    return original(self)


@hook(keras.Variable, "__reduce_ex__", "(self, protocol, /)")
def _reduce_ex(original, self, protocol):
    """A copy of a variable may share its array."""
    marks.forget(self)
    return original(self, protocol)


@hook(
    keras.optimizers.LossScaleOptimizer,
    "_common_apply",
    "(self, grads, trainable_variables=None)",
    when=in_replica,
)
def _common_apply(original, replica, self, grads, trainable_variables=None):
    """It assigns inside a `lax.cond`.

    JAX forbids that. Keras's trainer calls `stateless_apply`, and so does this in
    `run`, where the gradients have been summed by now.
    """
    variables = self.variables
    trainable = list(trainable_variables or self._trainable_variables)
    values, states = self.stateless_apply(
        [v.value for v in variables], list(grads), [v.value for v in trainable]
    )
    for variable, value in zip(
        [*trainable, *variables], [*values, *states], strict=True
    ):
        keras_state.write(variable, value)


# --- random numbers


@hook(keras_seeds, "global_seed_generator", "()", when=distribution_in_charge)
def _global_seed_generator(original, distribution):
    """It belongs to the process, not to a strategy.

    Made in a scope it would be bound to the strategy's devices, and every other model
    of the process would meet it there. And Keras refuses it inside a trace, where its
    state would become a constant; `run` threads it through like any variable.
    """
    if distributed_replica() is not None:
        generator = global_state.get_global_attribute(keras_state.SEED)
        if generator is None:
            with context.strategy_in_charge(None):
                generator = keras.random.SeedGenerator()
            global_state.set_global_attribute(keras_state.SEED, generator)
        return generator
    keras.distribution.set_distribution(None)
    try:
        with context.strategy_in_charge(None):
            return original()
    finally:
        keras.distribution.set_distribution(distribution)
