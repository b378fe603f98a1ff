"""Where a forward pass that is compiled needs other calls than an eager one."""

import keras

from keras_strategy.backends.torch.compilation import current_graph
from keras_strategy.keras_patches.patch import home_of, hook
from keras_strategy.keras_patches.random import keras_random

keras_nn = home_of(
    "_can_use_flash_attention moments",
    "keras.src.backend.torch.nn",
    "keras.src.backend.torch.ops.nn",
)


@hook(keras.Layer, "add_loss", "(self, loss)", when=current_graph)
def _add_loss(original, graph, self, loss):
    """A loss that comes up in a compiled forward pass is added when it is known."""
    graph.added.append((self, loss))


@hook(
    keras_nn,
    "_can_use_flash_attention",
    "(query, key, value, mask=None, is_causal=False, raise_error=False)",
    when=current_graph,
)
def _can_use_flash_attention(original, graph, *args, raise_error=False, **kwargs):
    """In a compiled forward pass torch chooses how attention is computed.

    Keras asks for what torch chooses anyway, in a way that torch.compile cannot follow.
    """
    return original(*args, raise_error=True, **kwargs) if raise_error else False


@hook(
    keras_nn,
    "moments",
    "(x, axes, keepdims=False, synchronized=False)",
    when=current_graph,
)
def _moments(original, graph, x, axes, *args, **kwargs):
    """A compiled forward pass knows lists, and not the lists that a layer keeps."""
    return original(x, list(axes), *args, **kwargs)


@hook(
    keras_random,
    "dropout",
    "(inputs, rate, noise_shape=None, seed=None)",
    when=current_graph,
)
def _dropout(original, graph, inputs, rate, noise_shape=None, seed=None):
    """What is dropped is drawn when the graph is executed, by the replica that does."""
    if not isinstance(rate, int | float) or not 0 < rate < 1:
        return original(inputs, rate, noise_shape, seed)
    return graph.dropped(inputs, rate, noise_shape, seed)
