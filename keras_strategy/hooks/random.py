"""Where Keras's random numbers are extended on every backend."""

import keras
from keras import ops

from keras_strategy.hooks.conditions import in_replica
from keras_strategy.hooks.hook import hook


@hook(keras.random.SeedGenerator, "next", "(self, ordered=True)", when=in_replica)
def _next(original, replica, self, ordered=True):
    """Every replica draws its own numbers.

    Only the drawn seed differs; the stored state advances as on one device.
    """
    seed = original(self, ordered)
    # A large prime keeps the replicas' seeds apart from each other and from
    # those of other generators, which users number 0, 1, 2...
    offset = ops.cast(ops.multiply(replica.id, 1000003), seed.dtype)
    return seed + ops.stack([offset, ops.zeros_like(offset)])
