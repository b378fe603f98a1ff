"""Patches of functions that torch.compile cannot trace in a forward pass."""

import keras

from keras_strategy.backends.torch.compilation import current_graph
from keras_strategy.keras_patches.patch import find_module, hook
from keras_strategy.keras_patches.random import draws_from_seed, keras_random

keras_nn = find_module(
    "_can_use_flash_attention moments",
    "keras.src.backend.torch.nn",
    "keras.src.backend.torch.ops.nn",
)


@hook(keras.Layer, "add_loss", "(self, loss)", when=current_graph)
def _add_loss(original, graph, self, loss):
    """Return the loss from the graph, and add it afterwards."""
    graph.losses.append((self, loss))


@hook(
    keras_nn,
    "_can_use_flash_attention",
    "(query, key, value, mask=None, is_causal=False, raise_error=False)",
    when=current_graph,
)
def _can_use_flash_attention(original, graph, *args, raise_error=False, **kwargs):
    """Let torch choose the attention kernel in a compiled forward pass."""
    # torch.compile cannot trace Keras's check, which predicts torch's own choice.
    return original(*args, raise_error=True, **kwargs) if raise_error else False


@hook(
    keras_nn,
    "moments",
    "(x, axes, keepdims=False, synchronized=False)",
    when=current_graph,
)
def _moments(original, graph, x, axes, *args, **kwargs):
    """Pass a list that torch.compile can trace, unlike a layer's tracked list."""
    return original(x, list(axes), *args, **kwargs)


@hook(
    keras_random,
    "dropout",
    "(inputs, rate, noise_shape=None, seed=None)",
    when=current_graph,
)
def _dropout(original, graph, inputs, rate, noise_shape=None, seed=None):
    """Draw the mask when the graph is executed, by the replica that executes it."""
    if not isinstance(rate, int | float) or not 0 < rate < 1:
        return original(inputs, rate, noise_shape, seed)
    is_seeded = draws_from_seed(seed, noise_shape)
    return graph.dropped(inputs, rate, noise_shape, seed, is_seeded)
