"""Where the JAX adapter extends Keras for variables that the devices share."""

from typing import Any

import keras
import numpy as np
from jax.core import Tracer

from keras_strategy.backends.jax.hooks_state import array_of
from keras_strategy.backends.jax.splitting import gathered_whole
from keras_strategy.hooks.hook import hook, of_several
from keras_strategy.rules.held_values import held_value
from keras_strategy.rules.ownership import strategy_of_variable
from keras_strategy.rules.sharding import is_split, making_slots, note_slot


@of_several
def _distribution_that_shards() -> Any:
    """The distribution in charge, if it splits what optimizers keep."""
    distribution = keras.distribution.distribution()
    return None if getattr(distribution, "shard", None) is None else distribution


@of_several
def _distribution_of_parts(variable: Any) -> Any:
    """The distribution of a variable of which this process has parts alone."""
    if not is_split(variable) or isinstance(array_of(variable), Tracer):
        return None
    distribution = strategy_of_variable(variable).extended.group.distribution
    return None if distribution.cluster is None else distribution


@hook(
    keras.optimizers.Optimizer,
    "add_variable",
    ("shape",),
    when=_distribution_that_shards,
)
def _add_variable(original, distribution, self, *args, **kwargs):
    """What an optimizer keeps is split when it is made.

    Each device holds a part alone, and at no time the whole. Keras would lay it out as
    the weight that it belongs to.
    """
    kwargs.pop("layout", None)
    with making_slots():
        variable = original(self, *args, **kwargs)
    note_slot(variable)
    return variable


@hook(keras.Variable, "__array__", "(self, dtype=None)", when=_distribution_of_parts)
def _array(original, distribution, self, dtype=None, copy=None):
    """A variable whose parts are on several workers is brought together.

    One at a time, as it is saved or read; all workers do.
    """
    known = held_value(self)
    if known is not None:
        return np.array(known, dtype)
    if array_of(self) is None:
        return original(self, dtype)
    whole = gathered_whole(self, distribution)
    first = distribution.devices[0]
    local = next(s.data for s in whole.addressable_shards if s.device == first)
    return np.array(local, dtype)  # of its own, whatever `copy` asks for
