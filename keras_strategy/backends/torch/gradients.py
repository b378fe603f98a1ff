"""Gradients by torch.autograd."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from keras import tree


class _Here(threading.local):
    """Whether this thread is in a function that gradients are taken of."""

    inside = False


_here = _Here()


def value_and_grad(
    fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool
) -> Callable[..., Any]:
    """See `keras_strategy.value_and_grad`."""

    def value_and_gradients(*args, **kwargs):
        # What an inner one returns, as for a penalty, is differentiated once more.
        inner, _here.inside = _here.inside, True
        try:
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
                    value,
                    [v.value for v in variables],
                    create_graph=inner,
                    allow_unused=True,
                )
        finally:
            _here.inside = inner

        def detach(x):
            return x.detach() if isinstance(x, torch.Tensor) else x

        if not inner:
            output = tree.map_structure(detach, output)
        return output, list(gradients)

    return value_and_gradients
