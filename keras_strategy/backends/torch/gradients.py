"""Gradients by torch.autograd."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from keras import tree


def value_and_grad(
    fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool
) -> Callable[..., Any]:
    """See `keras_strategy.value_and_grad`."""

    def value_and_gradients(*args, **kwargs):
        with torch.enable_grad():
            output = fn(*args, **kwargs)
            value = output[0] if has_aux else output
            if not isinstance(value, torch.Tensor) or value.numel() != 1:
                raise ValueError(
                    "Argument `fn` must return a scalar tensor to differentiate"
                    + (", and auxiliary outputs beside it" if has_aux else "")
                    + f". Received: {value!r}"
                )
            gradients = torch.autograd.grad(
                value, [v.value for v in variables], allow_unused=True
            )

        def detach(x):
            return x.detach() if isinstance(x, torch.Tensor) else x

        return tree.map_structure(detach, output), list(gradients)

    return value_and_gradients
