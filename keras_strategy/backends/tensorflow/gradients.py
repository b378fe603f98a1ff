"""Gradients by `tf.GradientTape`, in replica and in cross-replica context."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_strategy.hooks.variables import stored


def value_and_grad(
    fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool
) -> Callable[..., Any]:
    """Return a function of the value and the gradients of `fn`."""

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
                "The function passed to `value_and_grad` must return a scalar. "
                f"Received a tensor of the shape {value.shape}."
            )
        sources = [_tape_source(variable) for variable in variables]
        gradients = tape.gradient(value, sources)
        return ((value, aux) if has_aux else value), gradients

    return compute


def _tape_source(variable: Any) -> Any:
    """Return the tensor that a tape reads: in cross-replica context the first one."""
    value = stored(variable)
    is_mirrored = isinstance(value, tf.distribute.DistributedValues)
    if is_mirrored and tf.distribute.in_cross_replica_context():
        return tf.distribute.get_strategy().experimental_local_results(value)[0]
    return value
