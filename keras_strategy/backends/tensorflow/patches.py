"""Patches of Keras for the TensorFlow backend.

Keras has its own code for tf.distribute. Here gradients are reduced before anything
else, so each replica runs Keras's backend-neutral code on its own components, as a
single device does. This includes optimizers, which in Keras's TensorFlow code reduce
inside their update.
"""

import functools
import logging
import operator
import sys
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import LossScaleOptimizer, Optimizer
from tensorflow.python.framework import ops
from tensorflow.python.ops import cond_v2

from keras_strategy.backends.tensorflow.training import (
    MappedBatches,
    TrainingStrategy,
    make_traceable,
    remove_optionals,
)
from keras_strategy.core.context import distributed_replica
from keras_strategy.core.per_replica_attributes import set_on_all_replicas
from keras_strategy.keras_patches.data_adapters import (
    building,
    has_local_batches,
    join_batches,
    read_ahead,
    read_local_rows,
    synchronize,
)
from keras_strategy.keras_patches.internals import current_stateless_scope
from keras_strategy.keras_patches.losses_metrics import step_metrics_result
from keras_strategy.keras_patches.patch import (
    find_module,
    hook,
    in_distributed_scope,
    in_replica,
    in_scope_of_workers,
    in_step,
    model_hook,
    model_on_replicas,
    multi_replica_only,
)
from keras_strategy.keras_patches.random import keras_seeds
from keras_strategy.training.ownership import strategy_of_variable
from keras_strategy.training.row_weights import (
    compute_average_loss,
    local_bounds,
    scale_regularization_loss,
)
from keras_strategy.training.sharding import flat_shards_of
from keras_strategy.training.train_step import count_rows
from keras_strategy.training.variable_sync import is_sync_on_read

keras_losses = find_module("scale_loss_for_distribution", "keras.src.losses.loss")
TFEpochIterator: Any = find_module(
    "TFEpochIterator", "keras.src.backend.tensorflow.trainer"
).TFEpochIterator
logger = logging.getLogger("keras_strategy")

# The attribute of an epoch iterator that caches this worker's rows.
_LOCAL_ROWS = "_ks_local_rows"


# --- variables


@hook(keras.Variable, "_direct_assign", "(self, value)")
def _direct_assign(original, self, value):
    """Write the replica's component; split assignments to on_read variables."""
    # `Variable.assign` has aggregated the replicas' values. Native tf.distribute would
    # aggregate again, which fails inside a tf.cond and drops remainders of integers.
    replica = in_replica()
    if replica is not None:
        replica.write(self, value)
        return
    has_parts = is_sync_on_read(self) or flat_shards_of(self) is not None
    strategy = strategy_of_variable(self) if has_parts else None
    if strategy is None or strategy.extended.topology.num_replicas == 1:
        original(self, value)
        return
    strategy.extended.group.assign(self, value)


# --- layers


@hook(keras.Layer, "_maybe_build", "(self, call_spec)", when=in_replica)
def _maybe_build(original, replica, self, call_spec):
    """Build a layer in the first replica, for all replicas."""
    with set_on_all_replicas():
        original(self, call_spec)


# --- losses


@hook(
    keras_losses,
    ("scale_loss_for_distribution", "unscale_loss_for_distribution"),
    "(value)",
    when=in_replica,
)
def _unscaled(original, replica, value):
    """Keep the loss: replicas are weighted by their rows, not by 1 / N."""
    return value


@hook(
    tf.nn,
    "compute_average_loss",
    "(per_example_loss, sample_weight=None, global_batch_size=None)",
    when=in_replica,
)
def _compute_average_loss(original, replica, *args, **kwargs):
    """Return the mean over the rows of all replicas, in `run` and in `fit`."""
    # TensorFlow's function assumes equal rows on all replicas. In `fit`, where losses
    # are weighted by rows, it would divide by the replicas twice.
    return compute_average_loss(*args, **kwargs)


@hook(tf.nn, "scale_regularization_loss", "(regularization_loss)", when=in_replica)
def _scale_regularization_loss(original, replica, regularization_loss):
    """Avoid a second division by the replicas in `fit`."""
    return scale_regularization_loss(regularization_loss)


# --- the trainer


@model_hook("distribute_strategy", None, when=model_on_replicas)
def _distribute_strategy(original, strategy, self):
    """Give Keras's loop a stand-in for the native strategy."""
    return TrainingStrategy(strategy, self)


@model_hook("get_metrics_result", "(self)", when=in_step)
def _get_metrics_result(original, replica, self):
    """Leave the logs of Keras's own steps to `TrainingStrategy`, which merges them."""
    return step_metrics_result(original, replica, self)


@hook(TFEpochIterator, "_get_iterator", "(self)", when=in_scope_of_workers)
def _get_iterator(original, strategy, self):
    """Make workers agree on their batches, and read only their rows of them."""
    # Keras takes batches inside a tf.function, where workers cannot communicate.
    cluster = strategy.extended.cluster
    is_distributed = strategy.num_replicas_in_sync > 1
    if has_local_batches(self):
        local = len(strategy.extended.worker_devices)
        batches = MappedBatches(remove_optionals, original(self))
        batches = join_batches(self, batches, cluster, local, same_shapes=False)
        return MappedBatches(
            make_traceable, batches if is_distributed else batches.as_read()
        )
    if not hasattr(self, _LOCAL_ROWS):
        # Only once, because the shuffling of arrays continues from epoch to epoch.
        local_rows = is_distributed and read_local_rows(
            self.data_adapter,
            functools.partial(local_bounds, strategy.extended.topology),
            operator.methodcaller("get_tf_dataset"),
        )
        setattr(self, _LOCAL_ROWS, local_rows or None)
    local_rows = getattr(self, _LOCAL_ROWS)
    # Other data becomes a tf.data.Dataset, which prefetches by itself.
    batches = original(self) if local_rows is None else read_ahead(self, local_rows)
    elements = MappedBatches(remove_optionals, batches)
    return MappedBatches(make_traceable, synchronize(self, batches, cluster, elements))


@model_hook(
    "_maybe_symbolic_build",
    "(self, iterator=None, data_batch=None)",
    when=in_distributed_scope,
)
def _maybe_symbolic_build(original, strategy, self, iterator=None, data_batch=None):
    """Build every model from a global batch."""
    # Keras builds early only if the model was created in a native scope, and not from
    # batches with absent parts.
    if type(self).call is keras.Model.call:
        return  # `call` raises: the model's steps call its layers
    if iterator is not None:
        # Use the batch's spec. Reading a batch would advance the shuffling of the data,
        # which a single device does not do here.
        spec = iterator._distributed_dataset.element_spec
        data_batch = keras.tree.map_structure(_present, spec)
        specs = [leaf for leaf in keras.tree.flatten(data_batch) if leaf is not None]
        if any(leaf.shape.rank is None for leaf in specs):
            with building(iterator):
                for _, _, batches in iterator:
                    data_batch = next(batches)
                    data_batch = getattr(data_batch, "batch", data_batch)
                    break
    elif all(
        leaf is None or hasattr(leaf, "shape")
        for leaf in keras.tree.flatten(data_batch)
    ):
        count_rows(data_batch)  # raises earlier than the tf.function would
    try:
        self._symbolic_build(data_batch=keras.tree.map_structure(_present, data_batch))
    except Exception:
        steps = "train_step", "test_step"
        if all(getattr(type(self), s) is getattr(keras.Model, s) for s in steps):
            raise
        # The user's steps may change the data before they call the model. They build
        # the rest, as on one device.


def _present(leaf: Any) -> Any:
    absent = tf.experimental.Optional, tf.OptionalSpec, tf.NoneTensorSpec
    if leaf is None or isinstance(leaf, absent):
        return None
    if isinstance(leaf, tf.distribute.DistributedValues):
        return leaf.values[0]
    # Native tf.distribute has no public name for the spec of a distributed value.
    return getattr(leaf, "_value_specs", (leaf,))[0]


# --- control flow


_LIBRARIES = ("tensorflow.", "keras.", "keras_strategy.")


@hook(cond_v2, "cond_v2", ("pred",), when=in_replica)
def _cond(original, replica, pred, *args, **kwargs):
    """Record the condition of the branches, which must be equal on all replicas."""
    frame = sys._getframe()
    while frame.f_back and str(frame.f_globals.get("__name__")).startswith(_LIBRARIES):
        frame = frame.f_back
    replica.conditions.append((pred, f"{frame.f_code.co_filename}:{frame.f_lineno}"))
    try:
        return original(pred, *args, **kwargs)
    finally:
        replica.conditions.pop()


# --- the session


@hook(ops._DefaultGraphStack, "reset", "(self)", when=in_distributed_scope)
def _reset_default_graph(original, strategy, self):
    """Keep the default graph, which `clear_session` replaces."""
    # Native tf.distribute lists the open scopes there, and nothing else is in it.


# --- random numbers


@hook(keras_seeds, "global_seed_generator", "()", when=in_replica)
def _global_seed_generator(original, replica):
    """Use one generator for all replicas of a strategy."""
    # Keras stores it per thread, and the replicas' threads end with each run.
    return replica.seed_generator()


# --- optimizers

# The backend-neutral base class, which TensorFlow's overrides.
_NeutralOptimizer: Any = [
    cls for cls in Optimizer.__mro__ if "_backend_update_step" in vars(cls)
][-1]


def _backend_neutral(original, strategy, self, *args, **kwargs):
    """Call the backend-neutral method."""
    # Keras's method for TensorFlow reduces the gradients again, and updates the
    # variables of all replicas from one place.
    return getattr(_NeutralOptimizer, original.__name__)(self, *args, **kwargs)


_BACKEND_NEUTRAL = {
    "add_variable_from_reference": (
        "(self, reference_variable, name=None, initializer='zeros')"
    ),
    "_apply_weight_decay": "(self, variables)",
    "_backend_update_step": "(self, grads, trainable_variables, learning_rate)",
    "_overwrite_model_variables_with_average_value": "(self, trainable_variables)",
    "_backend_increment_gradient_accumulators": "(self, grads, acc_grads)",
}
if hasattr(Optimizer, "_backend_maybe_overwrite_model_variables"):
    # Since Keras 3.16, with a merge_call that fails in replicas.
    _BACKEND_NEUTRAL["_backend_maybe_overwrite_model_variables"] = (
        "(self, trainable_variables)"
    )


@multi_replica_only
def _on_replicas(optimizer: Any) -> Any:
    """Return the strategy of several replicas that an optimizer is used with."""
    # A step that runs whole is in no scope.
    owner = strategy_of_variable(getattr(optimizer, "iterations", optimizer))
    is_single = owner is None or owner.extended.topology.num_replicas == 1
    return in_distributed_scope() if is_single else owner


for _name, _signature in _BACKEND_NEUTRAL.items():
    hook(Optimizer, _name, _signature, when=_on_replicas)(_backend_neutral)


@hook(
    Optimizer,
    ("assign", "assign_add", "assign_sub"),
    "(self, variable, value)",
    when=in_distributed_scope,
)
def _assign_component(original, strategy, self, variable, value):
    """Write the replica's component or shard."""
    # TensorFlow's method writes to the variable's value, which for a sharded variable
    # is a tensor.
    replica: Any = distributed_replica()
    is_conditional = replica is not None and replica.write_condition is not None
    is_variable = isinstance(variable, keras.Variable)
    is_sharded = is_variable and flat_shards_of(variable) is not None
    if current_stateless_scope() is not None or is_conditional or is_sharded:
        if isinstance(value, tf.IndexedSlices):
            value = tf.convert_to_tensor(value)
        return getattr(_NeutralOptimizer, original.__name__)(self, variable, value)
    if replica is None:
        return original(self, variable, value)
    stored = variable.value if is_variable else variable
    return original(self, replica.component(stored), value)


@hook(
    LossScaleOptimizer,
    "_tf_apply",
    "(self, grads, trainable_variables=None)",
    when=in_replica,
)
def _tf_apply(original, replica, self, grads, trainable_variables=None):
    """Skip Keras's merge_call, because the gradients are equal on all replicas."""
    # With a sharded optimizer, replicas run collectives while they apply gradients,
    # which is impossible inside a tf.cond.
    if replica.group.strategy.shard is None:
        return self._common_apply(grads, trainable_variables)
    finite = self.check_finite(grads)
    replica.write_condition = finite
    try:
        self._stateful_handle_finite_grads(grads, trainable_variables)
    finally:
        replica.write_condition = None
    keras.ops.cond(finite, lambda: None, self._stateful_handle_non_finite_grads)
    return None
