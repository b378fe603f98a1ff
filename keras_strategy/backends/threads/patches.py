"""Where replicas that are threads of one process extend Keras.

Keras holds settings for each thread, and a layer is built once for all replicas.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from keras_strategy.backends.threads.scopes import ReplicaScope, WritesInPlace
from keras_strategy.core import context
from keras_strategy.core.per_replica_attributes import (
    current_attributes,
    set_on_all_replicas,
)
from keras_strategy.keras_patches.patch import home_of, hook, of_several

global_state = home_of(
    "GLOBAL_STATE_TRACKER get_global_attribute set_global_attribute",
    "keras.src.backend.common.global_state",
)
keras_seeds = home_of("global_seed_generator", "keras.src.random.seed_generator")

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
        """Gives the settings to this thread, which may be the one that has them."""
        before = []
        for name, attributes in self._trackers:
            tracker = vars(getattr(global_state, name))
            before.append((tracker, dict(tracker)))
            tracker.clear()
            for key, value in attributes.items():
                # Stacks, such as that of name scopes, grow in each thread.
                tracker[key] = list(value) if isinstance(value, list) else value
        try:
            yield
        finally:
            for tracker, attributes in before:
                tracker.clear()
                tracker.update(attributes)


def keep_global_seed_generator(generator: Any) -> None:
    """Gives this thread the seed generator that replicas made, if they made one."""
    if global_state.get_global_attribute(_SEED) is None:
        global_state.set_global_attribute(_SEED, generator)


@contextlib.contextmanager
def no_stateless_scope() -> Iterator[None]:
    """Lets this thread make variables that have a value at once."""
    scope = global_state.get_global_attribute("stateless_scope")
    global_state.set_global_attribute("stateless_scope", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("stateless_scope", scope)


def current_stateless_scope() -> Any:
    """The `StatelessScope` that this thread is in, or None."""
    return global_state.get_global_attribute("stateless_scope")


@of_several
def current_thread_replica() -> Any:
    """The replica whose thread this is, or None in a scope that holds values itself."""
    scope = current_stateless_scope()
    while scope is not None:
        if isinstance(scope, ReplicaScope):
            return scope.replica
        # A scope that a gradient is taken in knows the one around it.
        if not hasattr(scope, "parent"):
            return None
        scope = scope.parent
    replica = context.distributed_replica()
    return replica if isinstance(replica, WritesInPlace) else None


@hook(keras_seeds, "global_seed_generator", "()", when=current_thread_replica)
def _global_seed_generator(original, replica):
    """It is made once for all replicas, from one seed."""
    if global_state.get_global_attribute(_SEED) is not None:
        return original()
    generator = replica.global_seed_generator(original)
    global_state.set_global_attribute(_SEED, generator)
    return generator


# --- layers


@hook(
    keras.Layer,
    "_maybe_build",
    "(self, call_spec)",
    when=current_attributes,
    several=True,
)
def _maybe_build(original, own, self, call_spec):
    """The replica that comes first builds a layer for all of them."""
    if self.built:
        return original(self, call_spec)
    replica = current_thread_replica()
    if replica is None:  # it is traced
        with set_on_all_replicas():
            return original(self, call_spec)
    return replica.once(lambda: original(self, call_spec))
