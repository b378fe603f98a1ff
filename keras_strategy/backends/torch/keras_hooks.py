"""Where the torch adapter extends Keras, beside `training/keras_hooks.py`.

On torch, Keras writes to the variables as it goes, and layers keep tensors of the
batch on themselves. With a thread for each replica, what belongs to one must be kept
apart from what belongs to the others. Outside of replicas each hook calls the original.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import keras.src.backend.torch.random as keras_random
import keras.src.random.seed_generator as keras_seeds
import torch
from keras import tree
from keras.src.backend.common import global_state
from keras.src.layers.rnn.dropout_rnn_cell import DropoutRNNCell

from keras_strategy.backends.torch import components
from keras_strategy.backends.torch.run import process_generator
from keras_strategy.hooking import Hook
from keras_strategy.training.keras_hooks import strategy_of_model
from keras_strategy.training.row_weights import distributed_replica
from keras_strategy.variables import is_on_read

# --- settings that Keras holds for each thread

_OWN = ("stateless_scope", "current_call_ctx")
_SEED = "global_seed_generator"


class ThreadState:
    """What the calling thread has set, for the threads that work for it.

    `keras.src.backend.common.global_state` is thread-local: without this a replica
    would not know the dtype policy, the name scope or the seed generator.
    """

    def __init__(self, trackers: list[tuple[str, dict[str, Any]]]):
        self._trackers = trackers
        self._seed_generator: Any = None

    @classmethod
    def capture(cls) -> "ThreadState":
        """Takes the calling thread's settings."""
        trackers = []
        # Keras 3.16 has no tracker of settings any more.
        for name in ("GLOBAL_STATE_TRACKER", "GLOBAL_SETTINGS_TRACKER"):
            if hasattr(global_state, name):
                attributes = vars(getattr(global_state, name)).items()
                trackers.append((name, {k: v for k, v in attributes if k not in _OWN}))
        return cls(trackers)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Gives the settings to this thread."""
        for name, attributes in self._trackers:
            tracker = vars(getattr(global_state, name))
            tracker.clear()
            for key, value in attributes.items():
                # Stacks, such as that of name scopes, grow in each thread.
                tracker[key] = list(value) if isinstance(value, list) else value
        try:
            yield
        finally:
            self._seed_generator = global_state.get_global_attribute(_SEED)

    def keep_global_seed_generator(self) -> None:
        """Gives the calling thread the seed generator that the replicas made."""
        if global_state.get_global_attribute(_SEED) is None:
            global_state.set_global_attribute(_SEED, self._seed_generator)


@contextlib.contextmanager
def no_stateless_scope() -> Iterator[None]:
    """Lets this thread make variables that have a value at once."""
    scope = global_state.get_global_attribute("stateless_scope")
    global_state.set_global_attribute("stateless_scope", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("stateless_scope", scope)


def _global_seed_generator(original: Callable) -> Callable:
    """`global_seed_generator`: made once for all replicas, from one seed."""

    def global_seed_generator():
        replica = distributed_replica()
        if replica is None or global_state.get_global_attribute(_SEED) is not None:
            return original()
        generator = replica._replica.once(original)
        global_state.set_global_attribute(_SEED, generator)
        return generator

    return global_seed_generator


def _dropout(original: Callable) -> Callable:
    """`keras.random.dropout`: without a seed it draws from the process's generator.

    Also for a `SeedGenerator` without one, whose state it leaves as it is.
    """

    def dropout(inputs, rate, noise_shape=None, seed=None):
        replica: Any = distributed_replica()
        seeded = seed is not None and getattr(seed, "_initial_seed", seed) is not None
        if (
            replica is None
            or seeded
            or noise_shape is not None
            or inputs.device.type == "meta"
            or not 0 < rate < 1
        ):
            return original(inputs, rate, noise_shape, seed)
        keep = 1.0 - rate
        generator = replica._replica.generator(inputs.device)
        mask = torch.empty_like(inputs, requires_grad=False)
        return inputs * mask.bernoulli_(keep, generator=generator).div_(keep)

    return dropout


def _one_at_a_time(original: Callable) -> Callable:
    """`keras.random.gamma` and its like: they seed the process's generator.

    torch samples these distributions from no other; Keras puts its state back.
    """

    def draw(*args, **kwargs):
        if distributed_replica() is None:
            return original(*args, **kwargs)
        if kwargs.get("seed") is None:
            # The replicas meet to make it, which they could not while one has the lock.
            kwargs["seed"] = keras_seeds.global_seed_generator()
        with process_generator:
            return original(*args, **kwargs)

    return draw


# --- variables


def _variable_value(original: property) -> property:
    """`Variable.value`: outside of replicas an on_read variable is aggregated.

    With no replica's scope in the thread, Keras would read the first component.
    """
    get = original.fget
    assert get is not None

    def value(self):
        if not is_on_read(self) or keras_scope() is not None:
            return get(self)
        own = components.find(self)
        if own is None:
            return get(self)
        return self._maybe_autocast(own.aggregated(self))

    return property(value, original.fset, original.fdel, original.__doc__)


def keras_scope() -> Any:
    """The `StatelessScope` that this thread is in, or None."""
    return global_state.get_global_attribute("stateless_scope")


def _direct_assign(original: Callable) -> Callable:
    """`Variable._direct_assign`: outside of replicas all components are written."""

    def _direct_assign(self, value):
        own = components.find(self)
        if own is None:
            return original(self, value)
        return own.assign(self, value)

    return _direct_assign


# --- layers


def _replica_scope() -> Any:
    from keras_strategy.backends.torch.staging import ReplicaScope

    scope = keras_scope()
    return scope if isinstance(scope, ReplicaScope) else None


def _add_loss(original: Callable) -> Callable:
    """`Layer.add_loss`: a layer keeps its losses by their ids, on itself."""

    def add_loss(self, loss):
        scope = _replica_scope()
        if scope is None:
            return original(self, loss)
        losses = tree.flatten(loss)
        if not all(isinstance(x, torch.Tensor) for x in losses):
            return original(self, loss)  # which says what is wrong
        scope.layer_losses.setdefault(id(self), []).extend(losses)

    return add_loss


def _get_own_losses(original: Callable) -> Callable:
    """`Layer._get_own_losses`: those of this replica."""

    def _get_own_losses(self):
        scope = _replica_scope()
        if scope is None:
            return original(self)
        return list(scope.layer_losses.get(id(self), ()))

    return _get_own_losses


def _clear_losses(original: Callable) -> Callable:
    """`Layer._clear_losses`: those of this replica."""

    def _clear_losses(self):
        scope = _replica_scope()
        if scope is None:
            return original(self)
        scope.layer_losses.pop(id(self), None)
        for layer in self._layers:
            layer._clear_losses()

    return _clear_losses


def _zero_grad(original: Callable) -> Callable:
    """`zero_grad`, which Keras's train_step calls: this replica's gradients.

    torch would clear those of the first replica, from every replica's thread.
    """

    def zero_grad(self, set_to_none=True):
        if distributed_replica() is None:
            return original(self, set_to_none)
        for variable in self.variables:
            variable.value.grad = None

    return zero_grad


def _per_replica_attribute(name: str) -> property:
    """`DropoutRNNCell` keeps a mask on itself for the time steps of one call."""

    def key():
        replica = distributed_replica()
        return name if replica is None else f"{name}_of_replica_{replica._replica.id}"

    def fget(self):
        return vars(self).get(key())

    def fset(self, value):
        vars(self)[key()] = value

    return property(fget, fset)


# --- the trainer


def _make_function(kind: str) -> Callable[[Callable], Callable]:
    """`Model.make_train_function` and its like: a batch is `strategy.run`."""
    attribute = f"{kind}_function"

    def replace(original: Callable) -> Callable:
        def make(self, force=False):
            from keras_strategy.backends.torch.training import distributed_function

            before = getattr(self, attribute)
            original(self, force)
            strategy = strategy_of_model(self)
            if strategy is None or strategy.num_replicas_in_sync == 1:
                return
            if getattr(self, attribute) is not before:
                function = distributed_function(self, kind, strategy)
                setattr(self, attribute, function)

        return make

    return replace


def hooks() -> list[Hook]:
    """The hooks of the torch adapter."""
    for name in ("_dropout_mask", "_recurrent_dropout_mask"):
        setattr(DropoutRNNCell, name, _per_replica_attribute(name))
    return [
        Hook(keras_seeds, "global_seed_generator", "()", _global_seed_generator),
        Hook(
            keras_random,
            "dropout",
            "(inputs, rate, noise_shape=None, seed=None)",
            _dropout,
        ),
        *(
            Hook(keras_random, name, ("seed",), _one_at_a_time)
            for name in ("gamma", "beta", "binomial")
        ),
        Hook(keras.Variable, "value", None, _variable_value),
        Hook(keras.Variable, "_direct_assign", "(self, value)", _direct_assign),
        Hook(keras.Layer, "add_loss", "(self, loss)", _add_loss),
        Hook(keras.Layer, "_get_own_losses", "(self)", _get_own_losses),
        Hook(keras.Layer, "_clear_losses", "(self)", _clear_losses),
        Hook(keras.Layer, "zero_grad", "(self, set_to_none=True)", _zero_grad),
        *(
            Hook(
                keras.Model,
                f"make_{kind}_function",
                "(self, force=False)",
                _make_function(kind),
            )
            for kind in ("train", "test", "predict")
        ),
    ]
