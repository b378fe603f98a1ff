"""Where this adapter touches what Keras does not export.

Hooks first, with the reason for each; then the few private things that the rest of the
adapter needs, under names of our own.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import keras
from jax.core import Tracer
from keras import tree

from keras_strategy.backends.jax import marks
from keras_strategy.backends.jax.distribution import AXIS, put
from keras_strategy.backends.threads.hooks import global_state, keras_seeds
from keras_strategy.core import context
from keras_strategy.core.context import distributed_replica
from keras_strategy.hooks.conditions import in_replica, in_scope_of_workers
from keras_strategy.hooks.data_adapters import counts_of_arrays
from keras_strategy.hooks.hook import changed, home_of, hook, model_hook
from keras_strategy.hooks.variables import stored
from keras_strategy.input.agreement import AgreedBatches
from keras_strategy.rules import first_values
from keras_strategy.rules.ownership import strategy_of_model

jax_trainer = home_of(
    "JAXEpochIterator _distribute_data", "keras.src.backend.jax.trainer"
)
jax_distribution_lib = home_of(
    "distribute_tensor", "keras.src.backend.jax.distribution_lib"
)
get_stateless_scope = home_of(
    "get_stateless_scope", "keras.src.backend.common.stateless_scope"
).get_stateless_scope

# Under which name Keras keeps the process's own seed generator.
_SEED = "global_seed_generator"


def _distribution() -> Any:
    """The distribution of the strategy that is in charge of the devices."""
    distribution = keras.distribution.distribution()
    return distribution if hasattr(distribution, "place") else None


def _distribution_of(model: Any) -> Any:
    """The distribution of the strategy that a model trains under."""
    return _of_strategy(strategy_of_model(model))


def _distribution_of_workers(model: Any) -> Any:
    """The distribution of a model's strategy, if it is of several workers."""
    distribution = _distribution_of(model)
    return (
        None if distribution is None or distribution.cluster is None else distribution
    )


def _of_strategy(strategy: Any) -> Any:
    return (
        None
        if strategy is None
        else getattr(strategy.extended.group, "distribution", None)
    )


# --- the batches of fit and its like

if hasattr(jax_trainer.JAXEpochIterator, "_get_distributed_iterator"):
    # Until Keras 3.15 it has the layout of the first batch for all.
    _DATA = "(data, layouts=None)"

    @hook(
        jax_trainer.JAXEpochIterator,
        "_get_distributed_iterator",
        "(self, distribution)",
        when=_distribution,
    )
    def _get_distributed_iterator(original, ours, self, distribution):
        """There is a layout for every batch.

        Keras keeps that of the first batch, which a smaller last one may not fit.
        """
        batches = self.data_adapter.get_jax_iterator()
        batches = ours.noticing(_agreed(batches, self, ours))
        placed = map(jax_trainer._distribute_data, batches)
        return placed if jax.default_backend() == "cpu" else _one_ahead(placed)

else:
    _DATA = "(data, layouts=None, is_super_batch=False)"

    @hook(jax_trainer.JAXEpochIterator, "_get_iterator", "(self)", when=_distribution)
    def _get_iterator(original, ours, self):
        """Batches that cannot be split are noticed.

        In the Keras versions that have a layout for every batch by themselves. There,
        the batches of `steps_per_execution` steps come as one, with the steps in front.
        """
        batches = _agreed(original(self), self, ours)
        return ours.noticing(batches, self.steps_per_execution > 1)


def _one_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """Starts to move a batch to the devices while they compute the one before.

    Keras does so too, under a name that differs between its versions.
    """
    waiting = []
    for batch in batches:
        waiting.append(batch)
        if len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting


def _agreed(batches: Any, iterator: Any, distribution: Any) -> Any:
    """The batches; of several workers, while all of them have one."""
    if distribution.cluster is None:
        return batches
    counts = counts_of_arrays(iterator.data_adapter)
    return AgreedBatches(batches, distribution.cluster, counts)


@hook(jax_trainer, "_distribute_data", _DATA, when=_distribution)
def _distribute_data(original, ours, data, layouts=None, **kind):
    """Keras cannot place a sparse matrix on several devices.

    And takes twice as long for the others.
    """
    return ours.place_batch(data, kind.get("is_super_batch", False))


# --- the trainer


@model_hook(
    "_get_jax_state",
    "(self, trainable_variables=False, non_trainable_variables=False, "
    "optimizer_variables=False, metrics_variables=False, "
    "purge_model_variables=False)",
    when=_distribution,
)
def _get_jax_state(original, ours, self, purge_model_variables=False, **taken):
    """No two variables share an array that a step overwrites.

    Weights and their moving average do after a fit with `use_ema`. JAX cannot donate
    an array twice (on several devices that crashes), and the variable that does not
    take part in the step would be left with a deleted one.

    And the state that it takes out of the variables is noted, since Keras forgets it
    where the first step fails, and the model with it.
    """
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
    when=_distribution_of_workers,
)
def _make_function(original, distribution, self, force=False):
    """Workers wait for each other in what it makes.

    And what that returns is brought to all of them, since Keras or a callback reads it.
    """
    kind = original.__name__.split("_")[1]
    before = getattr(self, f"{kind}_function")
    result = original(self, force)
    made = getattr(self, f"{kind}_function")
    if made is not before:
        step = _step_of_workers(made, kind, distribution)
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


@model_hook(
    "_get_metrics_result_or_logs", "(self, logs)", when=_distribution_of_workers
)
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
    distribution = _of_strategy(vars(self).get("_ks_strategy"))
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
        return put(tensor, sharding)
    result = original(tensor, layout)
    if result is tensor or isinstance(tensor, Tracer):
        return result
    if isinstance(tensor, jax.Array) and (ours or _is_ours(tensor.sharding)):
        return jax.numpy.copy(result)
    return result


def _is_ours(sharding: Any) -> bool:
    return getattr(getattr(sharding, "mesh", None), "axis_names", ()) == (AXIS,)


@hook(keras.Variable, "_initialize", "(self, value)", when=in_scope_of_workers)
def _initialize(original, strategy, self, value):
    """The first value is the chief's on every worker."""
    original(self, value)
    if not isinstance(self._value, Tracer):
        first_values.note(strategy, self)


@hook(keras.Variable, "value", None)
def _value(original, self):
    """Who reads an array may keep it, so no program overwrites it.

    And a first value that is read is the chief's on every worker.
    """
    if first_values.waiting and get_stateless_scope() is None:
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
        write(variable, value)


# --- random numbers


@hook(keras_seeds, "global_seed_generator", "()", when=_distribution)
def _global_seed_generator(original, distribution):
    """It belongs to the process, not to a strategy.

    Made in a scope it would be bound to the strategy's devices, and every other model
    of the process would meet it there. And Keras refuses it inside a trace, where its
    state would become a constant; `run` threads it through like any variable.
    """
    if distributed_replica() is not None:
        generator = global_state.get_global_attribute(_SEED)
        if generator is None:
            with context.strategy_in_charge(None):
                generator = keras.random.SeedGenerator()
            global_state.set_global_attribute(_SEED, generator)
        return generator
    keras.distribution.set_distribution(None)
    try:
        with context.strategy_in_charge(None):
            return original()
    finally:
        keras.distribution.set_distribution(distribution)


# --- private state of Keras


def synchronize_state(model: keras.Model) -> None:
    """Gives the variables the values that Keras keeps to itself while it trains.

    The method lost its prefix in Keras 3.16.
    """
    method = getattr(model, "state_sync", None) or getattr(
        model, "jax_state_sync", None
    )
    if method is None:
        raise changed("Model.jax_state_sync", "is gone, and so is Model.state_sync")
    method()


def stateless_scope() -> Any:
    """The innermost `keras.StatelessScope` of this thread, or None."""
    return get_stateless_scope()


def initialize_pending() -> None:
    """Initialises variables that were made in a trace; to be called outside."""
    with keras.StatelessScope():
        pass


@contextlib.contextmanager
def outside_of_trace() -> Iterator[None]:
    """Lets code that a trace calls make variables with values, once and for all."""
    scope = get_stateless_scope()
    global_state.set_global_attribute("stateless_scope", None)
    try:
        with jax.ensure_compile_time_eval():
            yield
    finally:
        global_state.set_global_attribute("stateless_scope", scope)


def write(variable: Any, value: Any) -> None:
    """Assigns without bringing the replicas together: they have been."""
    scope = get_stateless_scope()
    if scope is None:
        variable._direct_assign(value)
    else:
        scope.add_update((variable, value))


def traced_value(variable: Any) -> Any:
    """What a variable is in the program that is being traced."""
    scope = get_stateless_scope()
    value = None if scope is None else scope.get_current_value(variable)
    return variable._value if value is None else value


array_of = stored


def arrays_of(variables: Iterable[Any]) -> list[Any]:
    """The arrays that variables hold: one call in every step, for all of them."""
    return list(map(array_of, variables))


def set_array(variable: Any, array: Any) -> None:
    """Makes `array`, which has the variable's placement already, its value."""
    variable._value = array


def set_arrays(variables: Iterable[Any], arrays: Iterable[Any]) -> None:
    """Makes each array its variable's value."""
    for variable, array in zip(variables, arrays, strict=True):
        variable._value = array


def set_layout(variable: Any, layout: Any) -> None:
    """Gives a variable a layout, and places its value by it."""
    variable._layout = layout
    variable._direct_assign(variable._value)


def global_seed() -> Any:
    """The variable of the process's own seed generator; None if there is none."""
    generator = global_state.get_global_attribute(_SEED)
    return None if generator is None else generator.state


def made_global_seed() -> Any:
    """The variable of the process's own seed generator, which is made if need be."""
    return keras_seeds.global_seed_generator().state


def is_global_seed(variable: Any) -> bool:
    """Whether a variable is the state of the process's own seed generator."""
    return variable is global_seed()


def release(variable: Any, array: Any) -> None:
    """Makes `array` a variable's value, bound to no devices."""
    variable._layout = None
    vars(variable).pop("_ks_strategy", None)
    variable._value = jax.numpy.asarray(jax.device_get(array))
