"""Patches of Keras layers on every backend."""

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_strategy.core import context
from keras_strategy.core.per_replica_attributes import current_turn
from keras_strategy.keras_patches.patch import (
    Patch,
    find_module,
    hook,
    in_scope,
    in_step,
    keras_changed_error,
)
from keras_strategy.options import GLOBAL
from keras_strategy.training import reduction, variable_sync
from keras_strategy.training.audit import has_no_external_state

keras_functional = find_module("Functional", "keras.src.models.functional")
logger = logging.getLogger("keras_strategy")
_warned_layers: weakref.WeakSet[Any] = weakref.WeakSet()


@hook(keras.Layer, "__new__", "(cls, *args, **kwargs)")
def _new(original, cls, *args, **kwargs):
    """Record the scope in which a model or layer is created as its strategy.

    Sequential and functional models, subclasses, `from_config`, `load_model` and
    `clone_model` all end here. Layers are included: a layer's class may also inherit
    from one of Keras's trainers.
    """
    layer = original(cls, *args, **kwargs)
    if current_turn.attributes is not None:
        current_turn.attributes.new_layers[id(layer)] = layer
    strategy = context.current_scope()
    if strategy is not None:
        vars(layer)["_ks_strategy"] = strategy
    return layer


# --- batch normalization


def _synchronized_is_refused() -> bool:
    try:
        keras.layers.BatchNormalization(synchronized=True, name="synchronized")
    except ValueError:
        return True
    return False


@hook(
    keras.layers.BatchNormalization,
    "__init__",
    ("synchronized",),
    when=in_scope,
    needed=_synchronized_is_refused,
)
def _batch_normalization(original, strategy, self, *args, synchronized=False, **kwargs):
    """Accept `synchronized` in a scope on every backend.

    Keras refuses it on JAX and torch, where it has no group to synchronize with.
    """
    if not synchronized:
        return original(self, *args, **kwargs)
    original(self, *args, **kwargs)
    self.synchronized = True


def _in_scope_or_dry_run() -> Any:
    """Return the strategy of the current scope, or the current dry run, or None."""
    return context.current_scope() or context.thread_state.dry_run


@hook(
    keras.layers.BatchNormalization,
    "_moments",
    "(self, inputs, mask)",
    when=_in_scope_or_dry_run,
)
def _moments(original, strategy, self, inputs, mask):
    """Compute global batch statistics where the layer or strategy asks for them.

    That is by the layer's `synchronized` or the strategy's `batch_statistics`. Outside
    of replicas (one device, a dry run, JAX's global program) all rows are present.
    While row independence is checked, the layer uses its moving statistics, which no
    row changes.
    """
    replica, dry_run = context.distributed_replica(), context.thread_state.dry_run
    if dry_run is not None and dry_run.tests_row_independence:
        return self.moving_mean, self.moving_variance
    if replica is not None:
        variable_sync.declare_if_central(self)  # it assigns its moving statistics next
    axes = self._reduction_axes
    if replica is not None and (
        self.synchronized or strategy.batch_statistics == GLOBAL
    ):
        return reduction.moments(
            replica, strategy.num_replicas_in_sync, inputs, axes, mask
        )
    if self.synchronized and mask is None:
        return ops.moments(inputs, axes=axes)  # Keras's own would synchronize
    return original(self, inputs, mask)


# --- recurrent layers


@hook(
    keras.layers.RNN,
    "call",
    "(self, sequences, initial_state=None, mask=None, training=False)",
    when=in_step,
)
def _rnn_call(original, replica, self, *args, **kwargs):
    """Refuse stateful layers: a replica sees other rows in each batch."""
    if self.stateful:
        raise ValueError(
            f"The layer '{self.name}' is stateful: it keeps a state for each row of a "
            "batch, but each replica has only some rows. Use the model with one "
            "replica, or call it in `strategy.run`, where each replica keeps the "
            "states of its local batch."
        )
    return original(self, *args, **kwargs)


# --- losses of layers


@hook(keras.Layer, "add_loss", "(self, loss)", when=in_step)
def _add_loss(original, replica, self, loss):
    """Warn once per layer that `add_loss` values are treated as means over rows.

    The optimizer weights a replica's loss by its rows, which is right for a mean. The
    value does not show if it is a sum.
    """
    if self not in _warned_layers:
        _warned_layers.add(self)
        logger.warning(
            "The layer '%s' calls `add_loss`: its value is treated as a mean over the "
            "rows of a batch (`ops.mean`). A sum over rows (`ops.sum`) gives a "
            "different loss on several replicas than on one device: divide it by "
            "the number of rows, `ops.shape(x)[0]`.",
            self.name,
        )
    return original(self, loss)


class _ActivityRegularizer(Patch):
    """Make the activity losses of all replicas add up to those of one device.

    Since 3.14 Keras divides them by the rows. The optimizer weights a replica's loss by
    its rows, which is right for a mean over rows but scales down a sum.
    """

    attribute = "activity_regularizer"
    multi_replica_only = True

    @property
    def target(self) -> str:
        return f"Layer.{self.attribute}"

    def is_needed(self) -> bool:
        """Return True if Keras sums activity losses over rows."""
        # No attribute of a class shows it, so measure it on two rows.
        layer = keras.layers.Identity(activity_regularizer=ops.sum, name="two_rows")
        layer(ops.ones((2, 1)))
        return float(layer.losses[0]) == 2.0

    def check(self) -> None:
        if hasattr(keras.Layer, self.attribute):
            raise keras_changed_error(self.target, "became a property")

    def install(self) -> None:
        """Replace the attribute by a property."""
        name = self.attribute

        def read(layer):
            if name not in vars(layer):
                raise AttributeError(f"{type(layer).__name__} has no {name} yet")
            regularizer, replica = vars(layer)[name], in_step()
            if regularizer is None or replica is None:
                return regularizer

            def unweighted(outputs):
                loss = regularizer(outputs)
                weight = ops.cast(replica.step.row_weight, loss.dtype)
                return ops.divide_no_nan(loss, weight)

            return unweighted

        def write(layer, regularizer):
            vars(layer)[name] = regularizer

        setattr(keras.Layer, name, property(read, write))


_activity_regularizer = _ActivityRegularizer()


# --- private state of Keras


def all_layers(model: keras.Layer) -> list[Any]:
    """Return a model or layer and all nested layers."""
    return list(model._flatten_layers())


def seed_generators(layers: Sequence[Any]) -> list[Any]:
    """Return the distinct seed generators of some layers, without nested layers."""
    parts = [generator for layer in layers for generator in layer._seed_generators]
    return list({id(generator): generator for generator in parts}.values())


_KERAS_MODELS = (keras.Model, keras.Sequential, keras_functional.Functional)
_keras_layers = frozenset(
    part
    for public in (*_KERAS_MODELS, *vars(keras.layers).values())
    # Including base classes.
    for part in (public.__mro__ if isinstance(public, type) else ())
) - {keras.layers.Lambda, keras.layers.TFSMLayer}
_pure_layers: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def is_purely_keras(layer: Any) -> bool:
    """Return True if all nested layers are Keras's and have no external state."""
    is_pure = _pure_layers.get(layer)
    if is_pure is None:
        layers = all_layers(layer)
        is_pure = all(type(inner) in _keras_layers for inner in layers)
        is_pure = _pure_layers[layer] = is_pure and has_no_external_state(layers)
    return is_pure


def user_code(model: keras.Model, kind: str) -> dict[str, str]:
    """Return the user-written parts of a model that `training.audit` checks.

    `kind` is "train", "test" or "predict"; the last has no loss. The keys are methods'
    names, the values names of the parts in warnings.
    """
    cls, layers, parts = type(model), all_layers(model), {}
    if not has_no_external_state(layers):
        return parts
    others = {other.__name__ for other in {*map(type, layers)} - _keras_layers}
    if cls.call not in [keras_class.call for keras_class in _KERAS_MODELS]:
        parts["call"] = f"`{cls.__name__}.call`"
    elif others and cls.call is not keras.Model.call:  # which raises
        parts["call"] = f"the model '{model.name}', with {', '.join(sorted(others))},"
    if cls.compute_loss is not keras.Model.compute_loss and kind != "predict":
        parts["compute_loss"] = f"`{cls.__name__}.compute_loss`"
    step = f"{kind}_step"
    has_own_step = getattr(cls, step) is not getattr(keras.Model, step)
    if has_own_step:
        parts[step] = f"`{cls.__name__}.{step}`"
    has_own_metrics = cls.compute_metrics is not keras.Model.compute_metrics
    if has_own_metrics and not has_own_step and kind != "predict":
        parts["compute_metrics"] = f"`{cls.__name__}.compute_metrics`"
    return parts
