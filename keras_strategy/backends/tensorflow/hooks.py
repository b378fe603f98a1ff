"""Where TensorFlow's side of Keras is extended. See hooks/.

Keras has its own code for tf.distribute, which reduces inside the optimizer's update
and writes all components from there. Here the gradients are reduced before anything
else, so every replica can do with Keras's backend-neutral code what one device does,
each on its own components.
"""

import logging
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_strategy.backends.tensorflow.replica import TensorFlowReplica
from keras_strategy.backends.tensorflow.training import TrainingStrategy
from keras_strategy.backends.tensorflow.worker_steps import (
    WorkerBatches,
    predictions_of_workers,
    steps_of_workers,
)
from keras_strategy.core import context
from keras_strategy.core.context import distributed_replica
from keras_strategy.hooks.hook import Hook, home_of, model_hook
from keras_strategy.hooks.trainer import counts_of_arrays
from keras_strategy.rules.aggregation import is_on_read
from keras_strategy.rules.ownership import strategy_of_model, strategy_of_variable
from keras_strategy.rules.step import rows_of

keras_seeds = home_of("global_seed_generator", "keras.src.random.seed_generator")
in_stateless_scope = home_of(
    "in_stateless_scope", "keras.src.backend.common.stateless_scope"
).in_stateless_scope
TFEpochIterator: Any = home_of(
    "TFEpochIterator", "keras.src.backend.tensorflow.trainer"
).TFEpochIterator
logger = logging.getLogger("keras_strategy")


def _replica() -> TensorFlowReplica | None:
    """This thread's replica, if there are others beside it."""
    replica = distributed_replica()
    assert replica is None or isinstance(replica, TensorFlowReplica)
    return replica


def _distributed_scope() -> bool:
    """Whether a strategy of several replicas is in charge here."""
    strategy = context.current_scope()
    return strategy is not None and strategy.num_replicas_in_sync > 1


# --- variables


def _direct_assign(original: Callable) -> Callable:
    """`Variable._direct_assign`: in a replica, write this replica's component.

    What the replicas assign has been brought together by `Variable.assign`. Native
    tf.distribute would do it again, and cannot inside a tf.cond.
    """

    def _direct_assign(self, value):
        replica = _replica()
        if replica is None:
            return original(self, value)
        replica.write(self, value)

    return _direct_assign


def _initialize(original: Callable) -> Callable:
    """`Variable._initialize`: what a replica makes exists on all devices at once.

    So layers, metrics and optimizers that are built when they are first called can
    be built inside a step, by the first replica that comes by.
    """

    def _initialize(self, value):
        replica = _replica()
        if replica is None:
            return original(self, value)
        if tf.is_tensor(value) and not isinstance(value, tf.Variable):
            constant = tf.get_static_value(value)
            if constant is None:
                raise ValueError(
                    "A variable that is made inside `strategy.run` must have an "
                    "initial value that does not depend on the replica's data. Make "
                    f"it outside, or give an initializer. Received: {value!r}"
                )
            value = constant
        replica.group.beside_the_replicas(lambda: original(self, value))

    return _initialize


def _map_aggregation(original: Callable) -> Callable:
    """`Variable._map_aggregation`: native variables never aggregate themselves.

    `Variable.assign` has aggregated before they are written, also what they refuse:
    the mean of whole numbers.
    """

    def _map_aggregation(self, aggregation):
        if _distributed_scope() and not is_on_read(self):
            aggregation = "none"
        return original(self, aggregation)

    return _map_aggregation


def _variable_value(original: property) -> property:
    """`Variable.value`: the first replica's, of all workers.

    Native tf.distribute reads such an on_read variable from each worker's own first.
    """
    get = original.fget
    assert get is not None

    def value(self):
        strategy = strategy_of_variable(self)
        if (
            strategy is None
            or strategy.extended.cluster is None
            or not is_on_read(self)
            or self.aggregation != "only_first_replica"
            or _replica() is not None
            or in_stateless_scope()
        ):
            return get(self)
        group = strategy.extended.group
        name = f"the value of '{self.path}'"
        with group.calling(name):
            part = group.part_of_this_worker(self)
            return self._maybe_autocast(group.workers.sum(name, part))

    return property(value, original.fset, original.fdel, original.__doc__)


def _as_number(original: Callable) -> Callable:
    """`Variable.__float__`, `__int__`: native mirrored variables lack them."""
    convert: Any = {"__float__": float, "__int__": int}[original.__name__]

    def method(self):
        distributed = isinstance(self._value, tf.distribute.DistributedValues)
        if not distributed or strategy_of_variable(self) is None or self.ndim > 0:
            return original(self)
        return convert(tf.convert_to_tensor(self.value).numpy())

    return method


# --- optimizers


def _neutral(name: str) -> Callable[[Callable], Callable]:
    """In our strategies, the optimizer's method that is the same on all backends."""
    owners = [cls for cls in keras.optimizers.Optimizer.__mro__ if name in vars(cls)]
    neutral = getattr(owners[-1], name)

    def replace(original: Callable) -> Callable:
        def method(self, *args, **kwargs):
            chosen = neutral if _distributed_scope() else original
            return chosen(self, *args, **kwargs)

        return method

    return replace


def _on_own_component(original: Callable) -> Callable:
    """`Optimizer.assign`, `assign_add`, `assign_sub`: write the own component."""

    def method(self, variable, value):
        replica = _replica()
        if replica is not None:
            if isinstance(variable, keras.Variable):
                variable = variable.value
            variable = replica.own(variable)
        return original(self, variable, value)

    return method


def _tf_apply(original: Callable) -> Callable:
    """`LossScaleOptimizer._tf_apply`: the gradients are equal on all replicas."""

    def _tf_apply(self, grads, trainable_variables=None):
        if _replica() is None:
            return original(self, grads, trainable_variables)
        return self._common_apply(grads, trainable_variables)

    return _tf_apply


def _apply(original: Callable) -> Callable:
    """`Optimizer.apply`: say what to do where there are no gradients to sum."""

    def apply(self, grads, trainable_variables=None):
        if _distributed_scope() and distributed_replica() is None:
            raise RuntimeError(
                "`optimizer.apply` was called outside the replicas of "
                f"{context.current_scope()!r}. Call it inside the function that "
                "`strategy.run` runs, where it sums the replicas' gradients."
            )
        return original(self, grads, trainable_variables)

    return apply


# --- the trainer


def _distribute_strategy(original: property) -> property:
    """`Model.distribute_strategy`: Keras's loop gets ours in place of the native."""
    get = original.fget
    assert get is not None

    def distribute_strategy(self):
        strategy = strategy_of_model(self)
        if strategy is None or strategy.num_replicas_in_sync == 1:
            return get(self)
        return TrainingStrategy(strategy, self)

    return property(distribute_strategy)


def _make_function(kind: str) -> Callable[[Callable], Callable]:
    """`Model.make_train_function` and its like: XLA compiles for one device only.

    And on several workers the function shall take only batches that all have.
    """
    attribute = f"{kind}_function"

    def replace(original: Callable) -> Callable:
        def make_function(self, force=False):
            strategy = strategy_of_model(self)
            if strategy is None or strategy.num_replicas_in_sync == 1:
                return original(self, force)
            if self.jit_compile:
                logger.warning(
                    "jit_compile=True is not used for the model '%s': on TensorFlow, "
                    "XLA cannot compile a step of several devices. The results are "
                    "the same.",
                    self.name,
                )
                self.jit_compile = False
            before = getattr(self, attribute)
            original(self, force)
            function = getattr(self, attribute)
            if strategy.extended.cluster is not None and function is not before:
                extended = strategy.extended
                if kind == "predict":
                    function = predictions_of_workers(
                        function, extended.group, extended.cluster
                    )
                else:
                    function = steps_of_workers(
                        function, extended.group, extended.cluster, self, kind
                    )
                setattr(self, attribute, function)

        return make_function

    return replace


def _get_iterator(original: Callable) -> Callable:
    """`TFEpochIterator._get_iterator`: several workers agree on their batches.

    Keras takes them inside a tf.function, where a worker could not ask the others.
    """

    def _get_iterator(self):
        dataset = original(self)
        strategy = context.current_scope()
        if strategy is None or strategy.extended.cluster is None:
            return dataset
        counts = counts_of_arrays(self.data_adapter)
        return WorkerBatches(dataset, strategy.extended.cluster, counts)

    return _get_iterator


def _maybe_symbolic_build(original: Callable) -> Callable:
    """`Model._maybe_symbolic_build`: build from a global batch, for every model.

    Keras builds early only where the model was made in a native scope, and not from
    batches that leave something out.
    """

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        if not _distributed_scope():
            return original(self, iterator, data_batch)
        if iterator is not None:
            # What a batch is made of, without a look at the first: one device leaves
            # the state of what shuffles the data alone here, too.
            spec = iterator._distributed_dataset.element_spec
            data_batch = keras.tree.map_structure(_present, spec)
            if any(leaf.shape.rank is None for leaf in _leaves(data_batch)):
                for _, _, batches in iterator:
                    data_batch = next(batches)
                    break
        elif all(
            leaf is None or hasattr(leaf, "shape")
            for leaf in keras.tree.flatten(data_batch)
        ):
            rows_of(data_batch)  # raises where a tf.function would find out late
        self._symbolic_build(data_batch=keras.tree.map_structure(_present, data_batch))

    return _maybe_symbolic_build


def _present(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, tf.experimental.Optional | tf.NoneTensorSpec):
        return None
    if isinstance(leaf, tf.OptionalSpec):
        return None
    if isinstance(leaf, tf.distribute.DistributedValues):
        return leaf.values[0]
    # Native tf.distribute has no public name for what describes such a value.
    return getattr(leaf, "_value_specs", (leaf,))[0]


def _leaves(structure: Any) -> list[Any]:
    return [leaf for leaf in keras.tree.flatten(structure) if leaf is not None]


# --- random numbers


def _global_seed_generator(original: Callable) -> Callable:
    """`global_seed_generator`: one for all replicas of a strategy.

    Keras keeps it per thread, and the replicas' threads end with each run.
    """

    def global_seed_generator():
        replica = _replica()
        if replica is None:
            return original()
        if replica.group.seed_generator is None:
            replica.group.seed_generator = keras.random.SeedGenerator()
        return replica.group.seed_generator

    return global_seed_generator


def hooks() -> list[Hook]:
    """All hooks of this backend."""
    optimizer = keras.optimizers.Optimizer
    scaled = keras.optimizers.LossScaleOptimizer
    apply = "(self, grads, trainable_variables=None)"
    neutral = {
        "add_variable_from_reference": (
            "(self, reference_variable, name=None, initializer='zeros')"
        ),
        "_apply_weight_decay": "(self, variables)",
        "_backend_update_step": "(self, grads, trainable_variables, learning_rate)",
        "_overwrite_model_variables_with_average_value": "(self, trainable_variables)",
        "_backend_increment_gradient_accumulators": "(self, grads, acc_grads)",
    }
    # Keras 3.16 has it, with a merge_call that fails in the replicas.
    overwrite = "_backend_maybe_overwrite_model_variables"
    if hasattr(optimizer, overwrite):
        neutral[overwrite] = "(self, trainable_variables)"
    return [
        Hook(keras.Variable, "_direct_assign", "(self, value)", _direct_assign),
        Hook(keras.Variable, "_initialize", "(self, value)", _initialize),
        Hook(
            keras.Variable, "_map_aggregation", "(self, aggregation)", _map_aggregation
        ),
        Hook(keras.Variable, "value", None, _variable_value),
        *(
            Hook(keras.Variable, name, "(self)", _as_number)
            for name in ("__float__", "__int__")
        ),
        *(
            Hook(optimizer, name, signature, _neutral(name))
            for name, signature in neutral.items()
        ),
        *(
            Hook(optimizer, name, "(self, variable, value)", _on_own_component)
            for name in ("assign", "assign_add", "assign_sub")
        ),
        Hook(optimizer, "apply", apply, _apply),
        Hook(scaled, "apply", apply, _apply),
        Hook(scaled, "_tf_apply", apply, _tf_apply),
        model_hook("distribute_strategy", None, _distribute_strategy),
        *(
            model_hook(
                f"make_{kind}_function", "(self, force=False)", _make_function(kind)
            )
            for kind in ("train", "test", "predict")
        ),
        Hook(TFEpochIterator, "_get_iterator", "(self)", _get_iterator),
        model_hook(
            "_maybe_symbolic_build",
            "(self, iterator=None, data_batch=None)",
            _maybe_symbolic_build,
        ),
        Hook(keras_seeds, "global_seed_generator", "()", _global_seed_generator),
    ]
