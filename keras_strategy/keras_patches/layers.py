"""Where Keras's layers are extended on every backend."""

import logging
import weakref
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_strategy.core import context
from keras_strategy.core.per_replica_attributes import current_turn
from keras_strategy.keras_patches.patch import (
    Extension,
    changed,
    home_of,
    hook,
    in_scope,
    in_step,
)
from keras_strategy.options import GLOBAL
from keras_strategy.training import reduction, variable_sync
from keras_strategy.training.audit import has_no_external_state

keras_functional = home_of("Functional", "keras.src.models.functional")
logger = logging.getLogger("keras_strategy")
_layers_that_add: weakref.WeakSet[Any] = weakref.WeakSet()


@hook(keras.Layer, "__new__", "(cls, *args, **kwargs)")
def _new(original, cls, *args, **kwargs):
    """A model belongs to the scope that it is made in.

    Every way to make a model ends here: Sequential, functional, subclass,
    from_config, load_model and clone_model. And a layer may be trained as a model is,
    if its class is one of Keras's trainers too.
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
    """In a scope `synchronized` works everywhere.

    Keras refuses it on JAX and torch, where it has nothing to synchronize with.
    """
    if not synchronized:
        return original(self, *args, **kwargs)
    original(self, *args, **kwargs)
    self.synchronized = True


def _in_scope_or_trial() -> Any:
    """The strategy whose scope this thread is in; or the trial."""
    return context.current_scope() or context.thread_state.dry_run


@hook(
    keras.layers.BatchNormalization,
    "_moments",
    "(self, inputs, mask)",
    when=_in_scope_or_trial,
)
def _moments(original, at, self, inputs, mask):
    """The statistics are those of the global batch, if that was asked for.

    By the layer's `synchronized`, or by the strategy's `batch_statistics`. Outside of
    replicas all rows are there: on one device, in a trial, and in JAX's global program.
    In a trial by rows the layer takes the moving ones, which are of no row.
    """
    replica, trial = context.distributed_replica(), context.thread_state.dry_run
    if trial is not None and trial.tests_row_independence:
        return self.moving_mean, self.moving_variance
    if replica is not None:
        variable_sync.declare_if_central(self)  # it assigns its moving statistics next
    axes = self._reduction_axes
    if replica is not None and (self.synchronized or at.batch_statistics == GLOBAL):
        return reduction.moments(replica, at.num_replicas_in_sync, inputs, axes, mask)
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
    """A replica's rows are not those that a stateful layer keeps states for."""
    if self.stateful:
        raise ValueError(
            f"The layer '{self.name}' is stateful: it keeps a state for each row of a "
            "batch, of which each replica has a part. Use the model with one replica, "
            "or call it in `strategy.run`, where each replica keeps the states of its "
            "own rows."
        )
    return original(self, *args, **kwargs)


# --- losses of layers


@hook(keras.Layer, "add_loss", "(self, loss)", when=in_step)
def _add_loss(original, replica, self, loss):
    """What it is taken for is said once for each layer.

    The optimizer weights a replica's loss by its rows, which is right for a mean over
    them. That a number is a sum cannot be seen.
    """
    if self not in _layers_that_add:
        _layers_that_add.add(self)
        logger.warning(
            "What the layer '%s' gives to `add_loss` is taken for a mean over the rows "
            "of a batch, as `ops.mean` makes it. Of a sum over rows (`ops.sum`), "
            "several replicas make another number than one device: divide it by "
            "the rows, `ops.shape(x)[0]`.",
            self.name,
        )
    return original(self, loss)


class _ActivityRegularizer(Extension):
    """In a step, a replica's activity losses add up to those of one device.

    Since 3.14 Keras divides them by the rows. The optimizer weights a replica's loss by
    its rows, which is right for a mean over them; of a sum it would take a part only.
    """

    attribute = "activity_regularizer"

    @property
    def of_several(self) -> bool:
        """It is asked for a regularizer in steps alone."""
        return True

    @property
    def target(self) -> str:
        """The attribute, which each layer has of its own."""
        return f"Layer.{self.attribute}"

    def is_needed(self) -> bool:
        """Whether Keras adds them up over the rows."""
        # Asked of a layer of two rows: nothing that can be read off a class tells.
        layer = keras.layers.Identity(activity_regularizer=ops.sum, name="two_rows")
        layer(ops.ones((2, 1)))
        return float(layer.losses[0]) == 2.0

    def check(self) -> None:
        """Raises `KerasVersionError` unless the attribute is each layer's own."""
        if hasattr(keras.Layer, self.attribute):
            raise changed(self.target, "became a property")

    def install(self) -> None:
        """Puts a property in the attribute's place."""
        setattr(keras.Layer, self.attribute, property(self._get, self._set))

    def _get(self, layer: Any) -> Any:
        if self.attribute not in vars(layer):
            raise AttributeError(f"{type(layer).__name__} has no {self.attribute} yet")
        regularizer = vars(layer)[self.attribute]
        replica = in_step()
        if regularizer is None or replica is None:
            return regularizer

        def unweighted(outputs):
            loss = regularizer(outputs)
            weight = ops.cast(replica.step.row_weight, loss.dtype)
            return ops.divide_no_nan(loss, weight)

        return unweighted

    def _set(self, layer: Any, regularizer: Any) -> None:
        vars(layer)[self.attribute] = regularizer


_activity_regularizer = _ActivityRegularizer()


# --- private state of Keras


def all_layers(model: keras.Layer) -> list[Any]:
    """A model or layer, its layers, and theirs."""
    return list(model._flatten_layers())


def seed_generators(layers: Sequence[Any]) -> list[Any]:
    """What layers draw from, each once.

    Args:
        layers: The layers, without those that they are made of.
    """
    found = [generator for layer in layers for generator in layer._seed_generators]
    return list({id(generator): generator for generator in found}.values())


_KERAS_MODELS = (keras.Model, keras.Sequential, keras_functional.Functional)
_keras_layers = frozenset(
    part
    for public in (*_KERAS_MODELS, *vars(keras.layers).values())
    # With what Keras's classes inherit from.
    for part in (public.__mro__ if isinstance(public, type) else ())
) - {keras.layers.Lambda, keras.layers.TFSMLayer}


_throughout: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def is_keras_throughout(layer: Any) -> bool:
    """Whether a layer and all in it are Keras's, and leave nothing when called."""
    known = _throughout.get(layer)
    if known is None:
        layers = all_layers(layer)
        known = all(type(inner) in _keras_layers for inner in layers)
        known = _throughout[layer] = known and has_no_external_state(layers)
    return known


def to_try(model: keras.Model, kind: str) -> dict[str, str]:
    """What of a model a user wrote, and `rules.row_trials` tries.

    Args:
        model: The model.
        kind: "train", "test" or "predict", which knows no loss.

    Returns:
        What a warning calls it, by "call", "compute_loss",
        "compute_metrics", "train_step", "test_step" and "predict_step".
    """
    cls, found = type(model), {}
    if not has_no_external_state(all_layers(model)):
        return found
    layers = {type(layer) for layer in all_layers(model)}
    others = {layer.__name__ for layer in layers - _keras_layers}
    if cls.call not in [keras_own.call for keras_own in _KERAS_MODELS]:
        found["call"] = f"`{cls.__name__}.call`"
    elif others and cls.call is not keras.Model.call:  # which raises
        found["call"] = f"the model '{model.name}', with {', '.join(sorted(others))},"
    if cls.compute_loss is not keras.Model.compute_loss and kind != "predict":
        found["compute_loss"] = f"`{cls.__name__}.compute_loss`"
    own_step = getattr(cls, f"{kind}_step") is not getattr(keras.Model, f"{kind}_step")
    if own_step:
        found[f"{kind}_step"] = f"`{cls.__name__}.{kind}_step`"
    own_metrics = cls.compute_metrics is not keras.Model.compute_metrics
    if own_metrics and not own_step and kind != "predict":
        found["compute_metrics"] = f"`{cls.__name__}.compute_metrics`"
    return found
