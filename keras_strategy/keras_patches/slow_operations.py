"""Slow-operation warning for the first step of a Keras loop, which may compile.

Backends patch the same functions, so this patch is installed after all others.
"""

import functools

from keras_strategy.keras_patches.patch import model_hook, model_on_replicas
from keras_strategy.training import saving


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

    @functools.wraps(step)
    def first(*args):
        setattr(self, name, step)
        what = f"{kind} step of the model '{self.name}'"
        return saving.run_first_step(step, what, strategy.extended.cluster, *args)

    setattr(self, name, first)
    return first if result is step else result
