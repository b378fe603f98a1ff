"""Patches of Keras, and stateless scopes, for replicas that are threads of one process.

Keras holds settings for each thread, sends every read and assignment of a variable to
the thread's `StatelessScope`, and a layer is built once for all replicas.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from keras_strategy.core.per_replica_attributes import (
    current_attributes,
    set_on_all_replicas,
)
from keras_strategy.core.protocols import Replica
from keras_strategy.devices import ReplicaTopology
from keras_strategy.keras_patches.internals import current_stateless_scope, global_state
from keras_strategy.keras_patches.patch import hook, multi_replica_only
from keras_strategy.keras_patches.random import (
    global_generator,
    keras_seeds,
    set_global_generator,
)
from keras_strategy.training.variable_sync import (
    is_sync_on_read,
    split_for_local_replicas,
)

# --- thread-local settings

_NOT_INHERITED = ("stateless_scope", "current_call_ctx", "distribution")


# `keras.src.backend.common.global_state` is thread-local. Without this a replica would
# have another dtype policy, name scope and seed generator.
Settings = dict[str, dict[str, Any]]


def copy_settings() -> Settings:
    """Copy the Keras settings of this thread, for threads that work for it."""
    # Keras 3.16 has no tracker for settings.
    trackers = ("GLOBAL_STATE_TRACKER", "GLOBAL_SETTINGS_TRACKER")
    return {
        tracker: {
            name: value
            for name, value in vars(getattr(global_state, tracker)).items()
            if name not in _NOT_INHERITED
        }
        for tracker in trackers
        if hasattr(global_state, tracker)
    }


@contextlib.contextmanager
def applied_settings(settings: Settings) -> Iterator[None]:
    saved = []
    for name, attributes in settings.items():
        tracker = vars(getattr(global_state, name))
        saved.append((tracker, dict(tracker)))
        tracker.clear()
        for key, value in attributes.items():
            # Each thread changes its own stacks, such as that of name scopes.
            tracker[key] = list(value) if isinstance(value, list) else value
    try:
        yield
    finally:
        for tracker, attributes in saved:
            tracker.clear()
            tracker.update(attributes)


def keep_global_seed_generator(generator: Any) -> None:
    """Set the global seed generator that replicas created, if this thread has none."""
    if global_generator() is None:
        set_global_generator(generator)


# --- reads and assignments of variables


class ReplicaScope(keras.StatelessScope):
    """The variables as one replica sees them."""

    # What it assigns stays in `state_mapping` until all replicas have succeeded.

    def __init__(self, replica: Replica):
        super().__init__(collect_losses=True, initialize_variables=False)
        self.replica = replica

    def local_value(self, variable: Any) -> Any:
        """Return what the replica stores of a variable: maybe only a shard."""
        return self.get_current_value(variable)


class MergedScope(keras.StatelessScope):
    """The variables as a `merge_call` sees them: those of all replicas."""

    # `aggregate` returns a sync-on-read variable's value, given the local replicas'.

    def __init__(
        self,
        scopes: Sequence[ReplicaScope],
        aggregate: Callable[[Any, Sequence[Any]], Any],
        topology: ReplicaTopology,
    ):
        super().__init__(initialize_variables=False)
        self._scopes, self._aggregate, self._topology = scopes, aggregate, topology

    def components(self, variable: Any) -> list[Any]:
        return [s.local_value(variable) for s in self._scopes]

    def assign_components(self, variable: Any, values: Sequence[Any]) -> None:
        for scope, value in zip(self._scopes, values, strict=True):
            scope.add_update((variable, value))

    def get_current_value(self, variable: Any) -> Any:
        values = self.components(variable)
        if any(value is None for value in values):
            return None
        if is_sync_on_read(variable) and variable.aggregation != "none":
            return self._aggregate(variable, values)
        return values[0]

    def add_update(self, update: tuple[Any, Any]) -> None:
        parts = split_for_local_replicas(*update, self._topology)
        self.assign_components(update[0], parts)


def unbuilt_variable_error(variable: Any) -> RuntimeError:
    """Return the error for a variable created in a replica, without a value."""
    return RuntimeError(
        f"The variable '{variable.path}' is used before it has a value. "
        "Build the layer or model before it is used in `strategy.run`."
    )


@multi_replica_only
def current_thread_replica() -> Any:
    """Return this thread's replica, or None in a scope with values of its own."""
    scope = current_stateless_scope()
    while scope is not None:
        if isinstance(scope, ReplicaScope):
            return scope.replica
        # The scope of a gradient has a reference to the outer one.
        scope = getattr(scope, "parent", None)
    return None


@hook(keras_seeds, "global_seed_generator", "()", when=current_thread_replica)
def _global_seed_generator(original, replica):
    """Create the generator once for all replicas, from one seed."""
    if global_generator() is not None:
        return original()
    generator = replica.global_seed_generator(original)
    set_global_generator(generator)
    return generator


# --- layers


@hook(
    keras.Layer,
    "_maybe_build",
    "(self, call_spec)",
    when=current_attributes,
    multi_replica_only=True,
)
def _maybe_build(original, attributes, self, call_spec):
    """Build a layer once for all replicas, in the first one."""
    if self.built:
        return original(self, call_spec)
    replica = current_thread_replica()
    if replica is None:  # it is traced
        with set_on_all_replicas():
            return original(self, call_spec)
    return replica.once(lambda: original(self, call_spec))


# --- losses of layers


def _stateless_scope():
    """Return the stateless scope that this thread is in, or None."""
    return current_stateless_scope()


@hook(keras.Layer, "add_loss", "(self, loss)", when=_stateless_scope)
def _add_loss(original, scope, self, loss):
    """Record the layers that add a loss in a stateless scope."""
    original(self, loss)
    vars(scope).setdefault("_ks_layers", []).append(self)


@hook(keras.StatelessScope, "__exit__", ("args", "kwargs"))
def _exit(original, self, *args, **kwargs):
    """Have layers forget the ids of their losses, which other losses may get."""
    # When called again, each layer removes losses with these ids, since
    # keras-team/keras#22395. If memory was reused, that is the new loss of another
    # layer, and it would not be minimized.
    for layer in vars(self).pop("_ks_layers", ()):
        layer._loss_ids.clear()
    return original(self, *args, **kwargs)
