"""All hooks, which are installed when the first strategies are made."""

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
    Extension,
    hooks_of,
    install,
    install_those_of_several,
)


def all_hooks() -> list[Extension]:
    """Those of all backends and those of the backend in use, in their order."""
    areas = (
        trainer,
        trainer,
        saving,
        layers,
        variables_optimizers,
        variables_optimizers,
        losses_metrics,
        losses_metrics,
    )
    areas += (data_adapters, resume, random, random, random, per_replica_attributes)
    areas += (*get_engine().patch_modules(), slow_operations)
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
