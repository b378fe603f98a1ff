"""Where Keras's metrics are extended on every backend."""

import keras

from keras_strategy.hooks.conditions import in_step
from keras_strategy.hooks.hook import hook


@hook(
    keras.metrics.Mean,
    "update_state",
    "(self, values, sample_weight=None)",
    when=in_step,
)
def _update_state(original, replica, self, values, sample_weight=None):
    """A scalar stands for this replica's rows.

    Keras counts a scalar once for each batch, and the batch is all replicas'.
    """
    if (
        sample_weight is None
        and not isinstance(values, keras.KerasTensor)
        and len(getattr(values, "shape", ())) == 0  # a Python number has none
    ):
        sample_weight = replica.step.row_weight
    return original(self, values, sample_weight)
