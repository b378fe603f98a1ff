"""Where this adapter touches what Keras does not export.

Hooks first, with the reason for each; then the few private things that the rest of the
adapter needs, under names of our own.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import keras
from jax.core import Tracer
from keras import tree

from keras_strategy.backends.jax import marks
from keras_strategy.backends.jax.distribution import AXIS, put
from keras_strategy.backends.threads import hooks as thread_hooks
from keras_strategy.backends.threads.hooks import global_state, keras_seeds
from keras_strategy.core import context
from keras_strategy.core.context import distributed_replica
from keras_strategy.hooks.hook import Hook, changed, home_of, model_hook
from keras_strategy.hooks.trainer import counts_of_arrays
from keras_strategy.input.agreement import AgreedBatches
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


def _get_distributed_iterator(original: Callable) -> Callable:
    """`JAXEpochIterator._get_distributed_iterator`: a layout for every batch.

    Keras keeps the layout of the first batch, which a smaller last one may not fit.
    """

    def _get_distributed_iterator(self, distribution):
        if not hasattr(distribution, "place"):  # not one of ours
            yield from original(self, distribution)
            return
        batches = self.data_adapter.get_jax_iterator()
        batches = distribution.noticing(_agreed(batches, self, distribution))
        placed = map(jax_trainer._distribute_data, batches)
        yield from placed if jax.default_backend() == "cpu" else _one_ahead(placed)

    return _get_distributed_iterator


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


def _get_iterator(original: Callable) -> Callable:
    """`JAXEpochIterator._get_iterator`: notices batches that cannot be split.

    In the Keras versions that have a layout for every batch by themselves. There, the
    batches of `steps_per_execution` steps come as one, with the steps in front.
    """

    def _get_iterator(self):
        distribution: Any = keras.distribution.distribution()
        batches = original(self)
        if not hasattr(distribution, "place"):  # not one of ours
            return batches
        batches = _agreed(batches, self, distribution)
        return distribution.noticing(batches, self.steps_per_execution > 1)

    return _get_iterator


def _agreed(batches: Any, iterator: Any, distribution: Any) -> Any:
    """The batches; of several workers, while all of them have one."""
    if distribution.cluster is None:
        return batches
    counts = counts_of_arrays(iterator.data_adapter)
    return AgreedBatches(batches, distribution.cluster, counts)


def _distribute_data(original: Callable) -> Callable:
    """`_distribute_data`: Keras cannot place a sparse matrix on several devices."""

    def _distribute_data(data, layouts=None, **kind):
        distribution: Any = keras.distribution.distribution()
        if not hasattr(distribution, "place"):  # not one of ours
            return original(data, layouts, **kind)
        steps = kind.get("is_super_batch", False)
        return tree.map_structure(
            lambda leaf: None if leaf is None else distribution.place_rows(leaf, steps),
            data,
        )

    return _distribute_data


def _iterator_hooks() -> list[Hook]:
    iterator = jax_trainer.JAXEpochIterator
    name = "_get_distributed_iterator"
    # Until Keras 3.15 it has the layout of the first batch for all.
    if hasattr(iterator, name):
        data = "(data, layouts=None)"
        ours = Hook(iterator, name, "(self, distribution)", _get_distributed_iterator)
    else:
        data = "(data, layouts=None, is_super_batch=False)"
        ours = Hook(iterator, "_get_iterator", "(self)", _get_iterator)
    return [ours, Hook(jax_trainer, "_distribute_data", data, _distribute_data)]


def _get_jax_state(original: Callable) -> Callable:
    """`Model._get_jax_state`: no two variables share an array that a step overwrites.

    Weights and their moving average do after a fit with `use_ema`. JAX cannot donate
    an array twice (on several devices that crashes), and the variable that does not
    take part in the step would be left with a deleted one.

    And the state that it takes out of the variables is noted, since Keras forgets it
    where the first step fails, and the model with it.
    """

    def _get_jax_state(self, purge_model_variables=False, **taken):
        ours = hasattr(keras.distribution.distribution(), "place")
        if ours:
            variables = [*self.variables, *self.metrics_variables]
            if getattr(self, "optimizer", None) is not None:
                variables += self.optimizer.variables
            seen: dict[int, Any] = {}
            for variable in variables:
                other = seen.setdefault(id(variable._value), variable)
                if other is not variable and variable._value is not None:
                    variable._value = jax.numpy.copy(variable._value)
        state = original(self, purge_model_variables=purge_model_variables, **taken)
        if ours and purge_model_variables:
            names = (name for name, wanted in taken.items() if wanted)
            self._jax_state = dict(zip(names, state, strict=True))
        return state

    return _get_jax_state


def _keeps_state(original: Callable) -> Callable:
    """`Model.evaluate`, `predict`: an exception leaves the variables their values.

    Keras takes them out of the model for the time of the loop, and only `fit` puts
    them back whatever happens.
    """

    def entry_point(self, *args, **kwargs):
        try:
            return original(self, *args, **kwargs)
        except BaseException:
            if _distribution_of(strategy_of_model(self)) is not None:
                synchronize_state(self)
            raise

    return entry_point


def _distribute_tensor(original: Callable) -> Callable:
    """`distribute_tensor`: a variable's value, on the devices of all processes.

    `jax.device_put` first compares what the processes have, by a collective; and it
    cannot take what is on all their devices already. Where it moves an array, the
    result may share memory with it, which a step overwrites that has either of them.
    """

    def distribute_tensor(tensor, layout):
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

    return distribute_tensor


def _is_ours(sharding: Any) -> bool:
    return getattr(getattr(sharding, "mesh", None), "axis_names", ()) == (AXIS,)


def _initialize(original: Callable) -> Callable:
    """`Variable._initialize`: the first value is the chief's on every worker."""

    def _initialize(self, value):
        original(self, value)
        strategy = context.current_scope()
        if strategy is not None and not isinstance(self._value, Tracer):
            strategy.extended.group.take_first([self])

    return _initialize


def _value(original: property) -> property:
    """`Variable.value`: who reads an array may keep it, so no program overwrites it."""
    read = original.fget
    assert read is not None

    def value(self):
        marks.lend(self)
        return read(self)

    return property(value, original.fset, original.fdel, original.__doc__)


def _reduce_ex(original: Callable) -> Callable:
    """`Variable.__reduce_ex__`: a copy of a variable may share its array."""

    def __reduce_ex__(self, protocol):
        marks.forget(self)
        return original(self, protocol)

    return __reduce_ex__


def _make_function(kind: str) -> Callable[[Callable], Callable]:
    """`Model.make_train_function` and its like: workers wait for each other in it.

    And what it returns is brought to all of them, since Keras or a callback reads it.
    """
    attribute = f"{kind}_function"

    def replace(original: Callable) -> Callable:
        def make(self, force=False):
            before = getattr(self, attribute)
            result = original(self, force)
            distribution = _distribution_of(strategy_of_model(self))
            made = getattr(self, attribute)
            if made is before or distribution is None or distribution.cluster is None:
                return result
            setattr(self, attribute, _step_of_workers(made, kind, distribution))
            return result

        return make

    return replace


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


def _get_metrics_result_or_logs(original: Callable) -> Callable:
    """`Model._get_metrics_result_or_logs`: here `fit` reads what the last step gave."""

    def _get_metrics_result_or_logs(self, logs):
        distribution = _distribution_of(strategy_of_model(self))
        if distribution is None or distribution.cluster is None:
            return original(self, logs)
        with distribution.cluster.member.waiting("the last step"):
            jax.block_until_ready(logs)
        return original(self, logs)

    return _get_metrics_result_or_logs


def _same_batch(original: Callable) -> Callable:
    """`Model.train_on_batch` and its like: all workers must be given one batch.

    Otherwise each would compute on the rows of another.
    """
    name = original.__name__

    def on_batch(self, x, *args, **kwargs):
        strategy = strategy_of_model(self)
        distribution = _distribution_of(strategy)
        if distribution is not None and distribution.cluster is not None:
            data = (x, args[:2], kwargs.get("y"), kwargs.get("sample_weight"))
            strategy.extended.group.workers.require_same_shapes(name, data)
        return original(self, x, *args, **kwargs)

    return on_batch


def _predict_on_batch(original: Callable) -> Callable:
    """`Model.predict_on_batch`: Keras forgets to distribute its batch."""

    def predict_on_batch(self, x):
        distribution = _distribution_of(strategy_of_model(self))
        if distribution is not None:
            x = tree.map_structure(
                lambda leaf: leaf if leaf is None else distribution.place_rows(leaf), x
            )
        return original(self, x)

    return predict_on_batch


def _call(original: Callable) -> Callable:
    """`Model.__call__`: an input committed to other devices is moved to the model.

    JAX refuses to compute with arrays that are bound to different sets of devices,
    such as a component of a PerReplica value and a variable of all replicas.
    """

    def __call__(self, *args, **kwargs):
        strategy = vars(self).get("_ks_strategy")
        distribution = _distribution_of(strategy)
        if distribution is not None and distributed_replica() is None:
            args, kwargs = tree.map_structure(distribution.place, (args, kwargs))
        return original(self, *args, **kwargs)

    return __call__


def _distribution_of(strategy: Any) -> Any:
    return (
        None
        if strategy is None
        else getattr(strategy.extended.group, "distribution", None)
    )


def _global_seed_generator(original: Callable) -> Callable:
    """`global_seed_generator`: it belongs to the process, not to a strategy.

    Made in a scope it would be bound to the strategy's devices, and every other model
    of the process would meet it there. And Keras refuses it inside a trace, where its
    state would become a constant; `run` threads it through like any variable.
    """

    def global_seed_generator():
        distribution = keras.distribution.distribution()
        if not hasattr(distribution, "place"):
            return original()
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

    return global_seed_generator


def _common_apply(original: Callable) -> Callable:
    """`LossScaleOptimizer._common_apply`: it assigns inside a `lax.cond`.

    JAX forbids that. Keras's trainer calls `stateless_apply`, and so does this in
    `run`, where the gradients have been summed by now.
    """

    def _common_apply(self, grads, trainable_variables=None):
        if distributed_replica() is None:
            return original(self, grads, trainable_variables)
        variables = self.variables
        trainable = list(trainable_variables or self._trainable_variables)
        values, states = self.stateless_apply(
            [v.value for v in variables], list(grads), [v.value for v in trainable]
        )
        for variable, value in zip(
            [*trainable, *variables], [*values, *states], strict=True
        ):
            write(variable, value)

    return _common_apply


@functools.cache
def hooks() -> list[Hook]:
    """The hooks of this adapter."""
    return [
        *_iterator_hooks(),
        model_hook(
            "_get_jax_state",
            "(self, trainable_variables=False, non_trainable_variables=False, "
            "optimizer_variables=False, metrics_variables=False, "
            "purge_model_variables=False)",
            _get_jax_state,
        ),
        *(model_hook(name, (), _keeps_state) for name in ("evaluate", "predict")),
        model_hook("predict_on_batch", "(self, x)", _predict_on_batch),
        Hook(
            jax_distribution_lib,
            "distribute_tensor",
            "(tensor, layout)",
            _distribute_tensor,
        ),
        Hook(keras.Variable, "_initialize", "(self, value)", _initialize),
        Hook(keras.Variable, "value", None, _value),
        Hook(keras.Variable, "__reduce_ex__", "(self, protocol, /)", _reduce_ex),
        *(
            model_hook(
                f"make_{kind}_function", "(self, force=False)", _make_function(kind)
            )
            for kind in ("train", "test", "predict")
        ),
        model_hook(
            "_get_metrics_result_or_logs", "(self, logs)", _get_metrics_result_or_logs
        ),
        *(
            model_hook(name, ("x",), _same_batch)
            for name in ("train_on_batch", "test_on_batch", "predict_on_batch")
        ),
        Hook(keras.Model, "__call__", "(self, *args, **kwargs)", _call),
        Hook(
            keras.optimizers.LossScaleOptimizer,
            "_common_apply",
            "(self, grads, trainable_variables=None)",
            _common_apply,
        ),
        Hook(keras_seeds, "global_seed_generator", "()", _global_seed_generator),
        # Last: a thread asks the others before the hook above makes the generator.
        *thread_hooks.hooks(),
    ]


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


def array_of(variable: Any) -> Any:
    """The array that a variable holds, whatever scope this is in."""
    return variable._value


def arrays_of(variables: Iterable[Any]) -> list[Any]:
    """The arrays that variables hold: one call in every step, for all of them."""
    return [variable._value for variable in variables]


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


def is_global_seed(variable: Any) -> bool:
    """Whether a variable is the state of the process's own seed generator."""
    return variable is global_seed()


def release(variable: Any, array: Any) -> None:
    """Makes `array` a variable's value, bound to no devices."""
    variable._layout = None
    vars(variable).pop("_ks_strategy", None)
    variable._value = jax.numpy.asarray(jax.device_get(array))
