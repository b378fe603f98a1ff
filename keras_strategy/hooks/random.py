"""Where Keras's random numbers are extended on every backend."""

from typing import Any

import keras
from keras import ops

from keras_strategy.core.context import DryRun
from keras_strategy.hooks.conditions import in_replica_or_dry_run
from keras_strategy.hooks.hook import home_of, hook
from keras_strategy.rules import central

global_state = home_of(
    "get_global_attribute set_global_attribute", "keras.src.backend.common.global_state"
)
keras_seeds = home_of(
    "draw_seed global_seed_generator", "keras.src.random.seed_generator"
)
# Under which name Keras keeps a thread's own seed generator.
_SEED = "global_seed_generator"


@hook(
    keras.random.SeedGenerator, "next", "(self, ordered=True)", when=in_replica_or_dry_run
)
def _next(original, replica, self, ordered=True):
    """Every replica draws its own numbers, unless they are those of its rows.

    Only the drawn seed differs; the stored state advances as on one device.
    """
    central.declare_if_central(self)  # it assigns its state
    seed = original(self, ordered)
    if isinstance(replica, DryRun):
        replica.drew_random = True
        return seed
    if replica.step.is_drawing:
        return seed  # see hooks/draws.py
    # A large prime keeps the replicas' seeds apart from each other and from
    # those of other generators, which users number 0, 1, 2...
    offset = ops.cast(ops.multiply(replica.id, 1000003), seed.dtype)
    return seed + ops.stack([offset, ops.zeros_like(offset)])


def kept_generator() -> Any:
    """The seed generator that Keras has for this thread, or None."""
    return global_state.get_global_attribute(_SEED)


def keep_generator(generator: Any) -> None:
    """Makes Keras have another seed generator for this thread."""
    global_state.set_global_attribute(_SEED, generator)
