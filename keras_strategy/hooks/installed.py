"""All hooks, which are installed when the first strategies are made."""

import functools
import threading

from keras_strategy.core.registry import get_engine
from keras_strategy.hooks import (
    augmentation,
    callbacks,
    data_adapters,
    draws,
    epochs,
    first_steps,
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
from keras_strategy.hooks.hook import (
    Extension,
    hooks_of,
    install,
    install_those_of_several,
)


def all_hooks() -> list[Extension]:
    """Those of all backends and those of the backend in use, in their order."""
    areas = (trainer, callbacks, saving, layers, variables, optimizers, losses, metrics)
    areas += (data_adapters, epochs, random, draws, augmentation, own_attributes)
    areas += (*get_engine().patch_modules(), first_steps)
    return hooks_of(*dict.fromkeys(areas))  # a module may be listed twice


# Several threads may make strategies at the same time.
_installing = threading.RLock()


def install_for(replicas: int) -> None:
    """Installs what a strategy needs, or nothing where one of all does not fit.

    Args:
        replicas: How many it has.
    """
    with _installing:
        _install_once()
        if replicas > 1:
            install_those_of_several()


@functools.cache
def _install_once() -> None:
    install(all_hooks())
