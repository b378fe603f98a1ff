"""Where replicas that are threads of one process extend Keras.

Layers keep tensors of the batch on themselves, and Keras holds settings for each
thread. What belongs to one replica must be kept apart from what belongs to the others.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
from keras import tree

from keras_strategy.backends.threads.scopes import ReplicaScope
from keras_strategy.hooks.hook import Extension, changed, home_of, hook

global_state = home_of(
    "GLOBAL_STATE_TRACKER get_global_attribute set_global_attribute",
    "keras.src.backend.common.global_state",
)
keras_seeds = home_of("global_seed_generator", "keras.src.random.seed_generator")
DropoutRNNCell: Any = home_of(
    "DropoutRNNCell", "keras.src.layers.rnn.dropout_rnn_cell"
).DropoutRNNCell

# --- settings that Keras holds for each thread

_OWN = ("stateless_scope", "current_call_ctx", "distribution")
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
        # Keras 3.16 keeps what were settings with the rest.
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


def keras_scope() -> Any:
    """The `StatelessScope` that this thread is in, or None."""
    return global_state.get_global_attribute("stateless_scope")


def replica_scope() -> ReplicaScope | None:
    """The scope of the replica whose thread this is, or None."""
    scope = keras_scope()
    while scope is not None and not isinstance(scope, ReplicaScope):
        # A scope that a gradient is taken in knows the one around it.
        scope = getattr(scope, "parent", None)
    return scope


@hook(keras_seeds, "global_seed_generator", "()", when=replica_scope)
def _global_seed_generator(original, scope):
    """It is made once for all replicas, from one seed."""
    if global_state.get_global_attribute(_SEED) is not None:
        return original()
    generator = scope.replica.once(original)
    global_state.set_global_attribute(_SEED, generator)
    return generator


# --- layers


@hook(keras.Layer, "_maybe_build", "(self, call_spec)", when=replica_scope)
def _maybe_build(original, scope, self, call_spec):
    """The replicas build a layer together, once."""
    if self.built:
        return original(self, call_spec)
    return scope.replica.once(lambda: original(self, call_spec))


@hook(keras.Layer, "add_loss", "(self, loss)", when=replica_scope)
def _add_loss(original, scope, self, loss):
    """A layer keeps its losses by their ids, on itself."""
    losses = tree.flatten(loss)
    if not all(keras.ops.is_tensor(x) for x in losses):
        return original(self, loss)  # which says what is wrong
    scope.layer_losses.setdefault(id(self), []).extend(losses)


@hook(keras.Layer, "_get_own_losses", "(self)", when=replica_scope)
def _get_own_losses(original, scope, self):
    """A replica's losses are its own."""
    return list(scope.layer_losses.get(id(self), ()))


@hook(keras.Layer, "_clear_losses", "(self)", when=replica_scope)
def _clear_losses(original, scope, self):
    """A replica's losses are its own."""
    scope.layer_losses.pop(id(self), None)
    for layer in self._layers:
        layer._clear_losses()


@dataclass(frozen=True)
class _OwnMask(Extension):
    """`DropoutRNNCell` keeps a mask on itself for the time steps of one call.

    That is an attribute and no function, so there is no signature to know it by: it is
    the one that the method sets which forgets the mask.

    Attributes:
        attribute: The attribute's name.
        reset: The method's.
    """

    attribute: str
    reset: str

    @property
    def target(self) -> str:
        """The attribute, which each cell has of its own."""
        return f"DropoutRNNCell.{self.attribute}"

    @property
    def when(self) -> Callable[..., Any]:
        """The condition."""
        return replica_scope

    def check(self) -> None:
        """Raises `KerasVersionError` unless the mask is where it was."""
        target = f"DropoutRNNCell.{self.reset}"
        if not hasattr(DropoutRNNCell, self.reset):
            raise changed(target, "is gone")
        if isinstance(vars(DropoutRNNCell).get(self.attribute), property):
            raise changed(self.target, "became a property")
        cell = DropoutRNNCell()
        getattr(cell, self.reset)()
        if self.attribute not in vars(cell):
            raise changed(target, f"no longer sets {self.attribute}")

    def install(self) -> None:
        """Gives each replica a mask of its own."""
        name = self.attribute

        def key():
            scope = replica_scope()
            if scope is None:
                return name
            return f"{name}_of_replica_{scope.replica.id}"

        def fget(cell):
            return vars(cell).get(key())

        def fset(cell, value):
            vars(cell)[key()] = value

        setattr(DropoutRNNCell, name, property(fget, fset))


_dropout_mask = _OwnMask("_dropout_mask", "reset_dropout_mask")
_recurrent_mask = _OwnMask("_recurrent_dropout_mask", "reset_recurrent_dropout_mask")
