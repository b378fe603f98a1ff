"""Gradients by tf.GradientTape, which works in and out of a replica."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_strategy.hooks.variables import stored


def value_and_grad(
    fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool
) -> Callable[..., Any]:
    """See `keras_strategy.value_and_grad`."""

    def compute(*args, **kwargs):
        with tf.GradientTape() as tape:
            for variable in variables:
                if not variable.trainable:
                    tape.watch(stored(variable))
            result = fn(*args, **kwargs)
            value, aux = result if has_aux else (result, None)
            value = tf.convert_to_tensor(value)
        if value.shape.rank not in (0, None):
            raise ValueError(
                "The function given to `value_and_grad` must return a scalar to "
                f"differentiate. Received a tensor of the shape {value.shape}."
            )
        gradients = tape.gradient(value, [_watched(variable) for variable in variables])
        return ((value, aux) if has_aux else value), gradients

    return compute


def _watched(variable: Any) -> Any:
    """What is read of a variable: outside of the replicas, the first one's."""
    value = stored(variable)
    mirrored = isinstance(value, tf.distribute.DistributedValues)
    if mirrored and tf.distribute.in_cross_replica_context():
        return tf.distribute.get_strategy().experimental_local_results(value)[0]
    return value
