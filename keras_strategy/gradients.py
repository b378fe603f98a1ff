"""The gradient call that a neutral training loop needs."""

from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_strategy.backends import get_backend


def value_and_grad(
    fn: Callable[..., Any],
    variables: Sequence[keras.Variable],
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Returns a function that computes `fn` and its gradients.

    It works inside and outside of `strategy.run`. Inside, the gradients are those
    of this replica's value; `optimizer.apply` sums them over the replicas.

    Args:
        fn: Returns a scalar, or with `has_aux` a pair of a scalar and a structure.
        variables: The variables to differentiate by.
        has_aux: Whether `fn` returns a pair.

    Returns:
        A function of `fn`'s arguments that returns `(value, gradients)`, or
        `((value, aux), gradients)`. The gradients are a list in the order of
        `variables`, each of its variable's shape, or None on torch and TensorFlow
        where the value does not depend on the variable.

    Example:

    ```python
    import keras
    import keras_strategy as ks

    v = keras.Variable(3.0)
    value, (gradient,) = ks.value_and_grad(lambda x: x * v * v, [v])(2.0)
    assert float(value) == 18.0 and float(gradient) == 12.0
    ```
    """
    return get_backend().value_and_grad(fn, list(variables), has_aux)
