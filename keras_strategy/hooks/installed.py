"""All hooks, which are installed when the first strategy is made."""

import functools

from keras_strategy.core.registry import get_engine
from keras_strategy.hooks import (
    callbacks,
    layers,
    losses,
    metrics,
    optimizers,
    own_attributes,
    random,
    saving,
    trainer,
    variables,
)
from keras_strategy.hooks.hook import Extension, hooks_of, install


def all_hooks() -> list[Extension]:
    """Those of all backends and those of the backend in use, in their order."""
    areas = (trainer, callbacks, saving, layers, variables, optimizers, losses, metrics)
    engines = get_engine().hook_modules()
    return hooks_of(*areas, random, own_attributes, *engines)


@functools.cache
def install_once() -> None:
    """Installs them all, or none where one does not fit."""
    install(all_hooks())
