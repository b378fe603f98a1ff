"""A debug mode: do the components of mirrored variables agree?

See `config.check_mirrored`.
"""

from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_strategy.core.registry import get_engine
from keras_strategy.errors import MirrorError
from keras_strategy.hooks.variables import stored
from keras_strategy.rules.aggregation import is_on_read

if TYPE_CHECKING:
    from keras_strategy.core.strategy import Strategy

# Set by `config.check_mirrored`.
enabled = False


def check(strategy: "Strategy", after: str) -> None:
    """Compares the components of all mirrored variables of a strategy.

    Args:
        strategy: The strategy.
        after: What was called before.

    Raises:
        MirrorError: If the components of a variable differ.
    """
    if strategy.num_replicas_in_sync == 1 or get_engine().in_trace():
        return
    drifted = []
    for variable in list(strategy.extended.variables.values()):
        if is_on_read(variable) or stored(variable) is None:
            continue
        first, *others = [
            keras.ops.convert_to_numpy(component)
            for component in strategy.extended.group.components(variable)
        ]
        for replica, other in enumerate(others, start=1):
            if not _same(first, other):
                drifted.append((variable, replica, _distance(first, other)))
                break
    if not drifted:
        return
    variable, replica, distance = drifted[0]
    more = f" (and of {len(drifted) - 1} more variables)" if len(drifted) > 1 else ""
    raise MirrorError(
        f"After `{after}` the components of the variable '{variable.path}'{more} "
        f"differ: replica {replica} holds another value than replica 0; they differ by "
        f"up to {distance:g}. What is assigned to a variable with aggregation='none' "
        "must not depend on the replica: give the variable an aggregation, 'sum', "
        "'mean' or 'only_first_replica', or synchronization='on_read' if each replica "
        "shall keep its own value."
    )


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    both_nan = (a != a) & (b != b)
    return bool(np.all((a == b) | both_nan))


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.nanmax(np.abs(a.astype("float64") - b.astype("float64"))))


class MirrorCheck(keras.callbacks.Callback):
    """Compares after each batch of `fit`.

    Args:
        strategy: The strategy of the model.
    """

    def __init__(self, strategy: "Strategy"):
        super().__init__()
        self._strategy = strategy

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Raises `MirrorError` if a step made components differ."""
        # On JAX, Keras keeps the variables' values to itself while it trains. The
        # method lost its prefix in Keras 3.16.
        for name in ("state_sync", "jax_state_sync"):
            if hasattr(self.model, name):
                getattr(self.model, name)()
                break
        check(self._strategy, f"fit, batch {batch}")
