"""Checks that replicas and workers hold equal values of mirrored variables.

All replicas and workers compute the same values, unless code changes a variable on one
of them or a device computes wrongly. `fit` compares them after each epoch and before
saving; `config.check_mirrored` compares after each batch.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_strategy.core.collectives import array_digest
from keras_strategy.core.registry import get_engine
from keras_strategy.errors import MirrorError, WorkersDifferError
from keras_strategy.keras_patches.variables_optimizers import stored_value
from keras_strategy.training.callbacks import LogFreeCallback
from keras_strategy.training.sharding import is_sharded
from keras_strategy.training.variable_sync import is_sync_on_read

if TYPE_CHECKING:
    from keras_strategy.core.protocols import Strategy


# Set by `config.check_mirrored`.
check_each_batch = False


def check_mirrored_variables(
    strategy: "Strategy", after: str, variables: Iterable[Any] | None = None
) -> None:
    """Compare the components of mirrored variables, by default of all in the strategy.

    `after` names the call that precedes the check, for the message.
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
            both_nan = (first != first) & (other != other)
            if not np.all((first == other) | both_nan):
                difference = first.astype("float64") - other.astype("float64")
                drifted.append((variable, replica, np.nanmax(np.abs(difference))))
                break
    if not drifted:
        return
    variable, replica, distance = drifted[0]
    more = f" (and of {len(drifted) - 1} more variables)" if len(drifted) > 1 else ""
    raise MirrorError(
        f"After `{after}` the components of the variable '{variable.path}'{more} "
        f"differ: replica {replica} differs from replica 0 by up to {distance:g}. "
        "The value assigned to a variable with aggregation='none' must not depend on "
        "the replica: give the variable an aggregation, 'sum', 'mean' or "
        "'only_first_replica', or synchronization='on_read' to keep one value per "
        "replica."
    )


def _mirrored_variables(model: keras.Model) -> list[Any]:
    """Return the variables of a model that all replicas hold equally."""
    optimizer = getattr(model, "optimizer", None)
    # The optimizer first: a different learning rate also causes different weights.
    variables = [*getattr(optimizer, "variables", ()), *model.variables]
    metrics = {id(variable) for variable in model.metrics_variables}
    return [
        variable
        for variable in variables
        if id(variable) not in metrics and _is_mirrored(variable)
    ]


def _is_mirrored(variable: Any) -> bool:
    if stored_value(variable) is None:
        return False
    return not (is_sync_on_read(variable) or is_sharded(variable))


class EpochCheck(keras.callbacks.Callback):
    """Callback that compares the model's variables after each epoch of `fit`."""

    def __init__(self, strategy: "Strategy"):
        super().__init__()
        self._strategy = strategy

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Compare the model's variables."""
        check_mirrored_variables(
            self._strategy, f"fit, epoch {epoch}", _mirrored_variables(self.model)
        )


class BatchCheck(EpochCheck, LogFreeCallback):
    """Callback that also compares all variables of the strategy after each batch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Compare all variables of the strategy."""
        # On JAX, Keras updates the variables only when this is called. The method lost
        # its prefix in Keras 3.16.
        for name in ("state_sync", "jax_state_sync"):
            if hasattr(self.model, name):
                getattr(self.model, name)()
                break
        check_mirrored_variables(self._strategy, f"fit, batch {batch}")


def check_same_values(
    strategy: Any,
    model: keras.Model,
    more: Any = None,
    operation: str = "the end of an epoch",
) -> list[Any]:
    """Compare the variables of a model and its optimizer between workers.

    `operation` says when this happens, for the message. Every worker sends `more`;
    return that of each worker, by rank.
    """
    cluster = strategy.extended.cluster
    variables, digests = _mirrored_variables(model), []
    for variable in variables:
        component = strategy.extended.group.components(variable)[0]
        digests.append(array_digest(keras.ops.convert_to_numpy(component))[:12])
    values, difference = cluster.first_difference(operation, digests, more)
    if difference is None:
        check_mirrored_variables(strategy, operation, variables)
        return values
    number, each = difference
    exists = number < len(variables)
    path = variables[number].path if exists else "which only others have"
    groups = cluster.format_by_value(each)
    raise WorkersDifferError(
        f"At {operation} the workers no longer hold the same values. The first "
        f"variable that differs is '{path}' (digests by worker: {groups}). "
        "Some code changed it only on some workers, such as a callback that not "
        "all workers have."
    )
