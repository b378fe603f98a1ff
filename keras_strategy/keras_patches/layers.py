"""Patches of Keras layers on every backend."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

from keras_strategy.core import context
from keras_strategy.core.per_replica_attributes import (
    ABSENT,
    current_attributes,
    current_turn,
    note_owner,
    setattr_hooks,
)
from keras_strategy.core.protocols import Strategy
from keras_strategy.core.registry import get_engine
from keras_strategy.core.step_state import active_recorder
from keras_strategy.errors import logger
from keras_strategy.keras_patches.internals import is_in_layer
from keras_strategy.keras_patches.patch import (
    MethodsPatch,
    find_module,
    hook,
    in_scope,
    in_step,
)
from keras_strategy.options import GLOBAL
from keras_strategy.training import reduction, variable_sync
from keras_strategy.training.train_step import has_torch_modules

keras_functional = find_module("Functional", "keras.src.models.functional")


@hook(keras.Layer, "__new__", "(cls, *args, **kwargs)")
def _new(original, cls, *args, **kwargs):
    """Record the scope in which a model or layer is created as its strategy."""
    # Sequential and functional models, subclasses, `from_config`, `load_model` and
    # `clone_model` all end here. Layers are included: a layer's class may also inherit
    # from one of Keras's trainers.
    layer = original(cls, *args, **kwargs)
    if current_turn.attributes is not None:
        current_turn.attributes.new_layers[id(layer)] = layer
    strategy = context.current_scope()
    if strategy is not None:
        vars(layer)["_ks_strategy"] = strategy
        note_owner(layer, strategy)
    return layer


# --- batch normalization


@hook(keras.layers.BatchNormalization, "__init__", ("synchronized",), when=in_scope)
def _batch_normalization(original, strategy, self, *args, synchronized=False, **kwargs):
    """Accept `synchronized` in a scope on every backend."""
    # Keras refuses it on JAX and torch, where it has no group to synchronize with.
    if not synchronized:
        return original(self, *args, **kwargs)
    original(self, *args, **kwargs)
    self.synchronized = True


def _in_scope_or_trial(layer: Any) -> Any:
    """Return the strategy in scope or of the layer, or the dry run or recorder."""
    strategy = context.current_scope() or vars(layer).get("_ks_strategy")
    return strategy or context.thread_state.dry_run or active_recorder()


@hook(
    keras.layers.BatchNormalization,
    "_moments",
    "(self, inputs, mask)",
    when=_in_scope_or_trial,
)
def _moments(original, strategy, self, inputs, mask):
    """Compute global statistics in `fit`, or where the layer or strategy asks."""
    # That is by the layer's `synchronized` or the strategy's `batch_statistics`.
    # Outside of replicas (one device, a dry run, JAX's global program) all rows are
    # present.
    replica = context.distributed_replica()
    if replica is not None:
        # It assigns its moving statistics next; `fit` declares them after the step.
        if replica.step.row_weight is None:
            variable_sync.declare_state_rules(self)
        else:
            variable_sync.declare_if_shared(self)
    axes = self._reduction_axes
    if replica is not None and (
        self.synchronized
        or strategy.batch_statistics == GLOBAL
        or (strategy.batch_statistics is None and in_step() is not None)
    ):
        return reduction.moments(
            replica, strategy.extended.topology.num_replicas, inputs, axes, mask
        )
    if self.synchronized and mask is None:
        return ops.moments(inputs, axes=axes)  # Keras's own would synchronize
    mean, variance = original(self, inputs, mask)
    if replica is None or replica.step.row_weight is not None:
        return mean, variance
    # In `run` a replica may have no rows. Its statistics would make all others NaN.
    has_rows = ops.shape(inputs)[0] > 0
    if has_rows is True:
        return mean, variance
    return (
        ops.where(has_rows, mean, self.moving_mean.value),
        ops.where(has_rows, variance, self.moving_variance.value),
    )


_reported: weakref.WeakSet[Any] = weakref.WeakSet()


def report_normalizations(strategy: Strategy, model: keras.Model) -> None:
    """Log a faster option, once for a model in which many layers communicate."""
    kind = keras.layers.BatchNormalization
    count = sum(isinstance(x, kind) and x.trainable for x in all_layers(model))
    is_global = strategy.batch_statistics is None and (
        get_engine().has_replicas_in_fit or strategy.virtual_replicas is not None
    )
    if count > 20 and is_global and strategy.is_chief and model not in _reported:
        _reported.add(model)
        logger.info(
            "In each training step of the model '%s', %d BatchNormalization layers "
            'communicate, to equal one device. batch_statistics="local" of the '
            "strategy is faster: each replica normalizes by its local batch.",
            *(model.name, count),
        )


# --- attributes that a replica sets


@dataclass(frozen=True)
class _Noted(MethodsPatch):
    """Keep what a replica sets on a layer separate per replica until the run ends."""

    # These functions are called very often, so they are replaced only while replicas
    # take turns, and the replacement costs one thread-local lookup otherwise.

    owner: Any
    wrappers: dict[str, Callable[[Any], Any]]
    condition: Callable[..., Any] | None = current_attributes

    def install(self) -> None:
        """Register the replacement for the time in which replicas take turns."""
        # JAX may have no such turns, and Keras sets attributes in each step of fit.
        for name, wrap in self.wrappers.items():
            setattr_hooks.add(self.owner, name, wrap)


def _setting(original: Callable) -> Callable:
    @functools.wraps(original)
    def replacement(self, name, value):
        own = current_turn.attributes
        # Keras sets some to the same value in every call of a layer.
        if own is not None and vars(self).get(name, ABSENT) is not value:
            setter = getattr(getattr(type(self), name, None), "fset", None)
            if setter is not None:
                # TensorFlow's layers would not call it for the value that they have,
                # but a turn's end does not restore what else it set.
                return setter(self, value)
            own.set(self, name, value)
        return original(self, name, value)

    return replacement


def _deleting(original: Callable) -> Callable:
    @functools.wraps(original)
    def replacement(self, name):
        own = current_turn.attributes
        if own is not None:
            own.set(self, name, ABSENT)
        return original(self, name)

    return replacement


def _clearing_losses(original: Callable) -> Callable:
    @functools.wraps(original)
    def replacement(self):
        own = current_turn.attributes
        if own is not None and (self._losses or self._loss_ids):
            own.keep(self._losses)
            own.keep(self._loss_ids)
        original(self)

    return replacement


def _setting_trainable(original: property) -> property:
    def set_trainable(self, value):
        own = current_turn.attributes
        if own is not None:
            own.set(self, "trainable", value)
        original.__set__(self, value)

    return original.setter(set_trainable)


_layer = _Noted(
    keras.Layer,
    {
        "__setattr__": _setting,
        "__delattr__": _deleting,
        "_clear_losses": _clearing_losses,
    },
)
# A layer's `trainable` sets that of its variables.
_variable = _Noted(keras.Variable, {"trainable": _setting_trainable})


@hook(
    keras.Layer,
    "add_loss",
    "(self, loss)",
    when=current_attributes,
    multi_replica_only=True,
)
def _add_loss(original, attributes, self, loss):
    """Keep the losses of a layer separate per replica."""
    attributes.keep(self._losses)
    attributes.keep(self._loss_ids)
    original(self, loss)


# --- private state of Keras

context.is_in_layer = is_in_layer


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
        is_pure = _pure_layers[layer] = is_pure and not has_torch_modules(layers)
    return is_pure


@contextlib.contextmanager
def compute_in_float32(layers: Iterable[keras.Layer]) -> Iterator[None]:
    """Context manager in which layers of half precision compute in float32."""
    full = keras.dtype_policies.DTypePolicy("float32")
    before = {
        layer: layer.dtype_policy
        for layer in layers
        if layer.compute_dtype in ("float16", "bfloat16")
    }
    for layer in before:
        vars(layer)["_dtype_policy"] = full  # the setter refuses some changes
    try:
        yield
    finally:
        for layer, policy in before.items():
            vars(layer)["_dtype_policy"] = policy
