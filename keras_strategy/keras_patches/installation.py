"""Installation of all patches when the first strategies are created."""

import functools
import threading

from keras_strategy.core.registry import get_engine
from keras_strategy.keras_patches import (
    data_adapters,
    layers,
    losses_metrics,
    per_replica_attributes,
    random,
    resume,
    saving,
    slow_operations,
    trainer,
    variables_optimizers,
)
from keras_strategy.keras_patches.patch import (
    Patch,
    install,
    install_multi_replica_patches,
    patches_in,
)


def all_patches() -> list[Patch]:
    """Return the patches of this process: the common ones, then the backend's."""
    modules = (trainer, saving, layers, variables_optimizers, losses_metrics)
    modules += (data_adapters, resume, random, per_replica_attributes)
    return patches_in(*modules, *get_engine().patch_modules(), slow_operations)


# Several threads may create strategies at the same time.
_installing = threading.RLock()


def install_for(replicas: int) -> None:
    """Install the patches that a strategy needs; none of them if one does not fit."""
    with _installing:
        _install_once()
        if replicas > 1:
            install_multi_replica_patches()


@functools.cache
def _install_once() -> None:
    install(all_patches())
