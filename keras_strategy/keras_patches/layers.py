"""Patches of Keras layers on every backend."""

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
from keras import ops

from keras_strategy.core import context
from keras_strategy.core.per_replica_attributes import current_turn
from keras_strategy.core.step_recorder import active_recorder
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
from keras_strategy.training.row_weights import call_on_global_batch
from keras_strategy.training.train_step import has_torch_modules

keras_state = find_module(
    "get_global_attribute", "keras.src.backend.common.global_state"
)
keras_functional = find_module("Functional", "keras.src.models.functional")


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


def _in_scope_or_trial() -> Any:
    """Return the strategy in scope, the dry run or the recorder of a step, or None."""
    trial = context.thread_state.dry_run or active_recorder()
    return context.current_scope() or trial


@hook(
    keras.layers.BatchNormalization,
    "_moments",
    "(self, inputs, mask)",
    when=_in_scope_or_trial,
)
def _moments(original, strategy, self, inputs, mask):
    """Compute global batch statistics where the layer or strategy asks for them.

    That is by the layer's `synchronized` or the strategy's `batch_statistics`. Outside
    of replicas (one device, a dry run, JAX's global program) all rows are present.
    """
    replica = context.distributed_replica()
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


class _ActivityRegularizer(Patch):
    """Compute a layer's activity loss from the outputs of all replicas.

    The optimizer weights a replica's loss by its rows. Since 3.14 Keras divides it by
    these rows before. So the sums that Keras's own regularizers return add up; before,
    they must be divided by the weight. Any other function gets the gathered outputs.
    """

    attribute = "activity_regularizer"
    multi_replica_only = True

    @property
    def target(self) -> str:
        return f"Layer.{self.attribute}"

    def check(self) -> None:
        if hasattr(keras.Layer, self.attribute):
            raise keras_changed_error(self.target, "became a property")

    def install(self) -> None:
        """Replace the attribute by a property."""
        name, divides = self.attribute, _divides_by_rows()

        def read(layer):
            if name not in layer.__dict__:  # torch.compile cannot trace `vars`
                raise AttributeError(f"{type(layer).__name__} has no {name} yet")
            regularizer = layer.__dict__[name]
            if regularizer is None:
                return None
            replica = in_step()
            is_sum = type(regularizer) in _SUMS
            if replica is None or (is_sum and divides):
                return regularizer
            return functools.partial(
                _activity_loss, replica, regularizer, is_sum, divides
            )

        def write(layer, regularizer):
            vars(layer)[name] = regularizer

        setattr(keras.Layer, name, property(read, write))


_SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


def _divides_by_rows() -> bool:
    """Return True if Keras divides activity losses by the number of rows."""
    # No attribute of a class shows it, so measure it on two rows.
    layer = keras.layers.Identity(activity_regularizer=ops.sum, name="two_rows")
    layer(ops.ones((2, 1)))
    return float(layer.losses[0]) == 1.0


def _activity_loss(replica, regularizer, is_sum, divides, outputs):
    weight = replica.step.row_weight
    if is_sum:
        loss = regularizer(outputs)
        return ops.divide_no_nan(loss, ops.cast(weight, loss.dtype))
    loss = call_on_global_batch(replica, regularizer, outputs)
    if not divides or len(outputs.shape) == 0:
        return loss
    # Keras divides by the local rows, which are weight * all rows.
    return loss * ops.cast(weight, loss.dtype)


_activity_regularizer = _ActivityRegularizer()


# --- private state of Keras


def _is_in_layer() -> bool:
    return keras_state.get_global_attribute("current_call_ctx") is not None


context.register_layer_check(_is_in_layer)


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
