"""Patch of `clear_session`, which may be called in a scope or a callback of `fit`."""

import keras

from keras_strategy.keras_patches.patch import find_module, hook, in_scope

global_state = find_module(
    "get_global_attribute set_global_attribute clear_session",
    "keras.src.backend.common.global_state",
)
# Keras's names for what the scopes of strategies and replicas set in this thread.
_SCOPES = ("distribution", "torch_device", "stateless_scope")


@hook(keras.backend, "clear_session", "(free_memory=True)", when=in_scope)
@hook(keras.utils, "clear_session", "(free_memory=True)", when=in_scope)
def _clear_session(original, strategy, free_memory=True):
    """Keep what open scopes have set.

    Without it, later variables and batches are on other devices than earlier ones.
    """
    kept = {name: global_state.get_global_attribute(name) for name in _SCOPES}
    original(free_memory)
    for name, value in kept.items():
        global_state.set_global_attribute(name, value)
