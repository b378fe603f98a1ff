"""Do the components of mirrored variables agree?

It is looked at after each epoch, and in a debug mode after each batch: see
`config.check_mirrored`.

Whether all workers still hold the same values.

They compute the same, so they do, unless somebody changes a variable on one worker
alone, or a device computes wrongly. It is looked at once in an epoch, and before they
are saved.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_strategy.core.collectives import array_digest
from keras_strategy.core.registry import get_engine
from keras_strategy.errors import MirrorError, WorkersDifferError
from keras_strategy.keras_patches.variables_optimizers import stored
from keras_strategy.training.callbacks import LogFreeCallback
from keras_strategy.training.sharding import is_sharded
from keras_strategy.training.variable_sync import is_sync_on_read

if TYPE_CHECKING:
    from keras_strategy.core.protocols import Strategy


# Set by `config.check_mirrored`.
enabled = False


def check(
    strategy: "Strategy", after: str, variables: Iterable[Any] | None = None
) -> None:
    """Compares the components of mirrored variables.

    Args:
        strategy: The strategy.
        after: What was called before.
        variables: The variables. Defaults to all of the strategy.

    Raises:
        MirrorError: If the components of a variable differ.
    """
    if strategy.num_replicas_in_sync == 1 or get_engine().is_tracing():
        return
    drifted = []
    if variables is None:
        variables = list(strategy.extended.variables.values())
    for variable in variables:
        if not _is_mirrored(variable):
            continue
        components = strategy.extended.group.components(variable)
        if len(components) == 1:
            continue
        first, *others = map(keras.ops.convert_to_numpy, components)
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


def mirrored_of(model: keras.Model) -> list[Any]:
    """The variables of a model of which all replicas hold the same values."""
    optimizer = getattr(model, "optimizer", None)
    # The optimizer's first: who has another learning rate has other weights, too.
    variables = [*getattr(optimizer, "variables", ()), *model.variables]
    metrics = {id(variable) for variable in model.metrics_variables}
    return [
        variable
        for variable in variables
        if id(variable) not in metrics and _is_mirrored(variable)
    ]


def _is_mirrored(variable: Any) -> bool:
    if stored(variable) is None:
        return False
    return not (is_sync_on_read(variable) or is_sharded(variable))


class EpochCheck(keras.callbacks.Callback):
    """Compares after each epoch of `fit` what the model holds.

    Args:
        strategy: The strategy of the model.
    """

    def __init__(self, strategy: "Strategy"):
        super().__init__()
        self._strategy = strategy

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Raises `MirrorError` if the epoch made components differ."""
        check(self._strategy, f"fit, epoch {epoch}", mirrored_of(self.model))


class BatchCheck(EpochCheck, LogFreeCallback):
    """Compares after each batch of `fit` as well, and all that the strategy has."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Raises `MirrorError` if a step made components differ."""
        # On JAX, Keras keeps the variables' values to itself while it trains. The
        # method lost its prefix in Keras 3.16.
        for name in ("state_sync", "jax_state_sync"):
            if hasattr(self.model, name):
                getattr(self.model, name)()
                break
        check(self._strategy, f"fit, batch {batch}")


def require_same_values(
    strategy: Any,
    model: keras.Model,
    more: Any = None,
    operation: str = "the end of an epoch",
) -> list[Any]:
    """Compares the variables of a model and its optimizer between the workers.

    Args:
        strategy: The strategy, of several workers.
        model: The model.
        more: A value to tell all workers.
        operation: When this is, for messages.

    Returns:
        What each worker tells, by rank.

    Raises:
        WorkersDifferError: If they hold other values.
        MirrorError: If the replicas of this worker do.
    """
    cluster = strategy.extended.cluster
    variables = mirrored_of(model)
    digests = [_digest(strategy, variable) for variable in variables]
    told, difference = cluster.first_difference(operation, digests, more)
    if difference is None:
        check(strategy, operation, variables)
        return told
    number, each = difference
    path = variables[number].path if number < len(variables) else "which others have"
    groups = cluster.format_by_value(each)
    raise WorkersDifferError(
        f"At {operation} the workers do not hold the same values any more. The first "
        f"variable that differs is '{path}' (digests by worker: {groups}). "
        "Somebody has changed it on some workers alone, such as a callback that not "
        "all of them have."
    )


def _digest(strategy: Any, variable: Any) -> str:
    first = strategy.extended.group.components(variable)[0]
    return array_digest(keras.ops.convert_to_numpy(first))[:12]
