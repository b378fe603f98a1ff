"""Installation of all patches when the first strategies are created."""

import functools
import sys
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
    session,
    trainer,
    variables_optimizers,
)
from keras_strategy.keras_patches.patch import (
    Patch,
    install,
    install_multi_replica_patches,
    model_hook,
    model_on_replicas,
    patches_in,
)
from keras_strategy.training.saving import run_first_step

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


def all_patches() -> list[Patch]:
    """Return the patches of this process: the common ones, then the backend's."""
    modules = (trainer, saving, layers, variables_optimizers, losses_metrics)
    modules += (data_adapters, resume, random, per_replica_attributes, session)
    this_module = sys.modules[__name__]
    return patches_in(*modules, *get_engine().patch_modules(), this_module)


# Here, because backends patch the same functions: it is installed after all others.
@model_hook(
    ("make_train_function", "make_test_function", "make_predict_function"),
    "(self, force=False)",
    when=model_on_replicas,
)
def _make_function(original, strategy, self, force=False):
    """Warn about a slow first step, for example during compilation."""
    kind = original.__name__.split("_")[1]
    name = f"{kind}_function"
    before = getattr(self, name)
    result = original(self, force)
    step = getattr(self, name)
    if step is before:
        return result

    what = f"{kind} step of the model '{self.name}'"
    cluster = strategy.extended.cluster
    first_steps = [functools.partial(run_first_step, step, what, cluster)]

    @functools.wraps(step)
    def first(*args):
        # Not if the user has wrapped it; the wrapper calls it in each step.
        if getattr(self, name) is first:
            setattr(self, name, step)
        return (first_steps.pop() if first_steps else step)(*args)

    setattr(self, name, first)
    return first if result is step else result
