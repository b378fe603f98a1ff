"""The first step of `fit` and its like, which may compile for long.

Hooks of adapters make steps of their own of Keras's, so this one comes after them all.
"""

import functools

from keras_strategy.keras_patches.patch import model_hook, of_distributed_strategy
from keras_strategy.training import slow_operations


@model_hook(
    ("make_train_function", "make_test_function", "make_predict_function"),
    "(self, force=False)",
    when=of_distributed_strategy,
)
def _make_function(original, strategy, self, force=False):
    """A first step that takes long says what it does. The others are as they were."""
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
        return slow_operations.run_first_step(
            step, what, strategy.extended.cluster, *args
        )

    setattr(self, name, first)
    return first if result is step else result
