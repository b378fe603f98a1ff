"""Where TensorFlow's side of Keras is extended. See hooks/.

Keras has its own code for tf.distribute. Here the gradients are reduced before anything
else, so every replica can do with Keras's backend-neutral code what one device does,
each on its own components. What that means for optimizers is in `hooks_optimizers`.
"""

import logging
from typing import Any

import keras
import tensorflow as tf

from keras_strategy.backends.tensorflow.training import TrainingStrategy
from keras_strategy.backends.tensorflow.worker_steps import (
    Elements,
    WorkerBatches,
    predictions_of_workers,
    steps_of_workers,
)
from keras_strategy.core.own_attributes import set_for_all
from keras_strategy.hooks.conditions import (
    in_distributed_scope,
    in_replica,
    in_scope_of_workers,
    in_step,
    of_distributed_strategy,
)
from keras_strategy.hooks.data_adapters import (
    building,
    counts_of_arrays,
    is_own,
    joined,
    own_rows,
    pauses_after,
    read_ahead,
)
from keras_strategy.hooks.hook import home_of, hook, model_hook
from keras_strategy.hooks.metrics import results_of_step
from keras_strategy.input.agreement import AgreedBatches
from keras_strategy.input.own_rows import share_of
from keras_strategy.rules.aggregation import is_on_read, no_value
from keras_strategy.rules.gradients import (
    compute_average_loss,
    scale_regularization_loss,
)
from keras_strategy.rules.held_values import held_value
from keras_strategy.rules.ownership import require_own_parts, strategy_of_variable
from keras_strategy.rules.sharding import shares_of
from keras_strategy.rules.step import rows_of

keras_seeds = home_of("global_seed_generator", "keras.src.random.seed_generator")
keras_losses = home_of("scale_loss_for_distribution", "keras.src.losses.loss")
in_stateless_scope = home_of(
    "in_stateless_scope", "keras.src.backend.common.stateless_scope"
).in_stateless_scope
TFEpochIterator: Any = home_of(
    "TFEpochIterator", "keras.src.backend.tensorflow.trainer"
).TFEpochIterator
logger = logging.getLogger("keras_strategy")


# --- variables


@hook(keras.Variable, "_direct_assign", "(self, value)")
def _direct_assign(original, self, value):
    """A replica writes its component; what others assign is dealt out if on_read.

    What the replicas assign has been brought together by `Variable.assign`. Native
    tf.distribute would do it again, and cannot inside a tf.cond. And of whole numbers
    that the replicas do not divide it would lose what is left.
    """
    replica = in_replica()
    if replica is not None:
        replica.write(self, value)
        return
    strategy = strategy_of_variable(self)
    has_parts = is_on_read(self) or shares_of(self) is not None
    if strategy is None or strategy.num_replicas_in_sync == 1 or not has_parts:
        original(self, value)
        return
    strategy.extended.group.assign(self, value)


@hook(keras.Variable, "_initialize", "(self, value)", when=in_distributed_scope)
def _initialize(original, strategy, self, value):
    """What a replica makes exists on all devices at once.

    So layers, metrics and optimizers that are built when they are first called can
    be built inside a step, by the first replica that comes by. And the first value of
    an on_read variable is dealt out.
    """

    def make():
        original(self, value)
        if is_on_read(self):
            strategy.extended.group.deal_out(self)

    replica: Any = in_replica()
    if replica is None:
        make()
        return
    if tf.is_tensor(value) and not isinstance(value, tf.Variable):
        constant = tf.get_static_value(value)
        if constant is None:
            raise ValueError(
                "A variable that is made inside `strategy.run` must have an "
                "initial value that does not depend on the replica's data. Make "
                f"it outside, or give an initializer. Received: {value!r}"
            )
        value = constant
    replica.peers.made += 1
    replica.peers.beside_them(make)


@hook(
    keras.Variable,
    "_map_aggregation",
    "(self, aggregation)",
    when=in_distributed_scope,
)
def _map_aggregation(original, strategy, self, aggregation):
    """Native variables never aggregate themselves.

    `Variable.assign` has aggregated before they are written, also what they refuse:
    the mean of whole numbers.
    """
    return original(self, aggregation if is_on_read(self) else "none")


@hook(keras.Variable, "value", None)
def _value(original, self):
    """Outside of replicas an on_read variable has one value, or none.

    Native tf.distribute reads the first replica's from each worker's own first.
    """
    strategy = strategy_of_variable(self)
    if strategy is None:
        return original(self)
    replica: Any = in_replica()
    if replica is not None:
        if self.aggregation == "sum":
            replica.step.read.add(id(self))
        shares = shares_of(self)
        if shares is not None and not in_stateless_scope():
            require_own_parts(replica.peers.strategy, self)
            return self._maybe_autocast(replica.whole_of(self, shares))
        if strategy is not replica.peers.strategy and not in_stateless_scope():
            if is_on_read(self):
                require_own_parts(replica.peers.strategy, self)
            elif replica.index >= len(strategy.extended.worker_devices):
                # All its components are the same.
                return self._maybe_autocast(strategy.extended.group.components(self)[0])
        return original(self)
    if shares_of(self) is not None and not in_stateless_scope():
        known = held_value(self)
        if known is None:
            known = strategy.extended.group.whole_of(self)
        return self._maybe_autocast(tf.convert_to_tensor(known))
    if not is_on_read(self):
        return original(self)
    if self.aggregation == "none":
        value = original(self)
        if isinstance(value, tf.distribute.DistributedValues):
            raise no_value(self)
        return value
    known = held_value(self)
    if known is not None:
        return self._maybe_autocast(known)
    if (
        strategy.extended.cluster is None
        or self.aggregation != "only_first_replica"
        or in_stateless_scope()
    ):
        return original(self)
    group = strategy.extended.group
    name = f"the value of '{self.path}'"
    with group.calling(name):
        part = group.part_of_this_worker(self)
        return self._maybe_autocast(group.workers.sum(name, part))


@hook(keras.Variable, "handle", None)
def _handle(original, self):
    """Who asks for a gradient outside of the replicas is told what to do."""
    try:
        return original(self)
    except ValueError as error:
        strategy = strategy_of_variable(self)
        if strategy is None or strategy.num_replicas_in_sync == 1:
            raise
        raise RuntimeError(
            f"The variable '{self.path}' of {strategy!r} is used by TensorFlow in the "
            "strategy's scope, but outside of its replicas, where it is no single "
            "variable. Put the step into a function that `strategy.run` calls, or use "
            "`keras_strategy.value_and_grad`."
        ) from error


# --- layers


@hook(keras.Layer, "_maybe_build", "(self, call_spec)", when=in_replica)
def _maybe_build(original, replica, self, call_spec):
    """The replica that comes first builds a layer for all of them."""
    with set_for_all():
        original(self, call_spec)


# --- losses


@hook(
    keras_losses,
    ("scale_loss_for_distribution", "unscale_loss_for_distribution"),
    "(value)",
    when=in_replica,
)
def _unscaled(original, replica, value):
    """Rows weight the replicas, not 1 / N."""
    return value


@hook(
    tf.nn,
    "compute_average_loss",
    "(per_example_loss, sample_weight=None, global_batch_size=None)",
    when=in_replica,
)
def _compute_average_loss(original, replica, *args, **kwargs):
    """It is the mean over the rows of all replicas, in `run` and in `fit`.

    TensorFlow's takes all replicas to have as many rows as this one. And in `fit` it
    would be divided by the replicas twice, since what they compute is weighted.
    """
    return compute_average_loss(*args, **kwargs)


@hook(tf.nn, "scale_regularization_loss", "(regularization_loss)", when=in_replica)
def _scale_regularization_loss(original, replica, regularization_loss):
    """In `fit` it would be divided by the replicas twice."""
    return scale_regularization_loss(regularization_loss)


# --- the trainer


@model_hook("distribute_strategy", None, when=of_distributed_strategy)
def _distribute_strategy(original, strategy, self):
    """Keras's loop gets ours in place of the native."""
    return TrainingStrategy(strategy, self)


@model_hook(
    ("make_train_function", "make_test_function", "make_predict_function"),
    "(self, force=False)",
    when=of_distributed_strategy,
)
def _make_function(original, strategy, self, force=False):
    """XLA compiles for one device only, and workers take what all of them have.

    On several workers the function that it makes takes only batches that all have.
    """
    kind = original.__name__.split("_")[1]
    if self.jit_compile:
        logger.warning(
            "jit_compile=True is not used for the model '%s': on TensorFlow, "
            "XLA cannot compile a step of several devices. The results are "
            "the same.",
            self.name,
        )
        self.jit_compile = False
    before = getattr(self, f"{kind}_function")
    original(self, force)
    function = getattr(self, f"{kind}_function")
    extended = strategy.extended
    if extended.cluster is None or function is before:
        return
    if kind == "predict":
        function = predictions_of_workers(function, extended.group)
    else:
        function = steps_of_workers(function, extended.group, self, kind)
    setattr(self, f"{kind}_function", function)


@model_hook("get_metrics_result", "(self)", when=in_step)
def _get_metrics_result(original, replica, self):
    """The logs of a step of Keras's own are merged once, by `TrainingStrategy`."""
    return results_of_step(original, replica, self)


@hook(TFEpochIterator, "_get_iterator", "(self)", when=in_scope_of_workers)
def _get_iterator(original, strategy, self):
    """Several workers agree on their batches, and read their own rows of them.

    Keras takes them inside a tf.function, where a worker could not ask the others.
    """
    cluster = strategy.extended.cluster
    several = strategy.num_replicas_in_sync > 1
    if is_own(self):
        local = len(strategy.extended.worker_devices)
        batches = Elements(original(self))
        batches = joined(self, batches, cluster, local, same_shapes=False)
        return WorkerBatches(batches if several else batches.as_read())
    if not hasattr(self, _OWN_ROWS):
        # Once: what shuffles arrays goes on from epoch to epoch.
        own = several and own_rows(self.data_adapter, share_of(strategy), _dataset_of)
        setattr(self, _OWN_ROWS, own or None)
    own = getattr(self, _OWN_ROWS)
    # What Keras makes of other data for tf.data is read ahead there.
    batches = original(self) if own is None else read_ahead(self, own)
    counts = counts_of_arrays(self.data_adapter)
    pauses = pauses_after(self, batches)
    agreed = AgreedBatches(Elements(batches), cluster, counts, pauses, tells=True)
    return WorkerBatches(agreed)


_OWN_ROWS = "_ks_own_rows"


def _dataset_of(adapter: Any) -> Any:
    return adapter.get_tf_dataset()


@model_hook(
    "_maybe_symbolic_build",
    "(self, iterator=None, data_batch=None)",
    when=in_distributed_scope,
)
def _maybe_symbolic_build(original, strategy, self, iterator=None, data_batch=None):
    """Every model is built from a global batch.

    Keras builds early only where the model was made in a native scope, and not from
    batches that leave something out.
    """
    if type(self).call is keras.Model.call:
        return  # that raises: the model's steps call its parts
    if iterator is not None:
        # What a batch is made of, without a look at the first: one device leaves
        # the state of what shuffles the data alone here, too.
        spec = iterator._distributed_dataset.element_spec
        data_batch = keras.tree.map_structure(_present, spec)
        if any(leaf.shape.rank is None for leaf in _leaves(data_batch)):
            with building(iterator):
                for _, _, batches in iterator:
                    data_batch = next(batches)
                    data_batch = getattr(data_batch, "batch", data_batch)
                    break
    elif all(
        leaf is None or hasattr(leaf, "shape")
        for leaf in keras.tree.flatten(data_batch)
    ):
        rows_of(data_batch)  # raises where a tf.function would find out late
    self._symbolic_build(data_batch=keras.tree.map_structure(_present, data_batch))


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


@hook(keras_seeds, "global_seed_generator", "()", when=in_replica)
def _global_seed_generator(original, replica):
    """There is one for all replicas of a strategy.

    Keras keeps it per thread, and the replicas' threads end with each run.
    """
    return replica.seed_generator()
