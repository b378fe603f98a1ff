"""All patches of Keras, which the first strategy installs."""

import functools
import threading

from keras_strategy.core.registry import get_engine
from keras_strategy.keras_patches import (
    data_adapters,
    layers,
    losses_metrics,
    patch,
    random,
    resume,
    saving,
    trainer,
    variables_optimizers,
)

_COMMON = (
    *(saving, layers, variables_optimizers, losses_metrics),
    *(data_adapters, resume, random),
)


def all_patches() -> list[patch.Patch]:
    """Return the patches of this process, in the order of installation."""
    # The trainer's run before the backend's patches of the same functions.
    return patch.patches_in(*_COMMON, *get_engine().patch_modules(), trainer)


# Several threads may create strategies at the same time.
_installing = threading.RLock()
_install_once = functools.cache(lambda: patch.install(all_patches()))


def install_for(replicas: int) -> None:
    """Install the patches that a strategy needs; none of them if one does not fit."""
    with _installing:
        _install_once()
        while replicas > 1 and patch.waiting:
            patch.waiting.pop(0).install()
