"""Checks that replicas and workers hold equal values, and stop together.

All replicas and workers compute the same values, unless code changes a variable on one
of them or a device computes wrongly. `fit` compares them after each epoch and before
saving; `config.check_mirrored` compares after each batch. `run` compares what functions
have assigned without an aggregation, after the first call of each function and after a
strategy's calls 1, 2, 4, 8 and so on.
"""

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from keras_strategy.cluster.membership import DelayedExchange
from keras_strategy.core.collectives import array_digest
from keras_strategy.core.protocols import Strategy
from keras_strategy.core.registry import get_engine
from keras_strategy.errors import MirrorError, WorkersDifferError, logger
from keras_strategy.keras_patches.internals import stored_value
from keras_strategy.training import ownership
from keras_strategy.training.callbacks import LogFreeCallback
from keras_strategy.training.sharding import is_sharded
from keras_strategy.training.variable_sync import is_sync_on_read

# Set by `config.check_mirrored`.
check_each_batch = False


def check_mirrored_variables(
    strategy: Strategy, after: str, variables: Iterable[Any] | None = None
) -> None:
    """Compare the components of variables, by default of all in the strategy."""
    # `after` names the call that precedes the check, for the message.
    local = strategy.extended.topology.local_replicas
    if len(local) == 1 or get_engine().is_tracing():
        return
    drifted = []
    if variables is None:
        variables = list(strategy.extended.variables.values())
    for variable in variables:
        if not _is_mirrored(variable):
            continue
        components = strategy.extended.group.components(variable)
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
        "the replica: reduce it first with `ks.get_replica_context().all_reduce`, or "
        "give the variable an aggregation, 'sum', 'mean' or 'only_first_replica', or "
        "synchronization='on_read' to keep one value per replica."
    )


def check_after_run(strategy: Strategy, is_first_call: bool) -> None:
    """Warn once if replicas differ in what functions of `run` have assigned."""
    extended = strategy.extended
    extended.checked_runs = count = extended.checked_runs + 1
    with strategy.scope():
        if check_each_batch:
            check_mirrored_variables(strategy, "strategy.run")
        elif is_first_call or count & (count - 1) == 0:
            try:
                assigned = list(extended.assigned_in_run.values())
                check_mirrored_variables(strategy, "strategy.run", assigned)
            except MirrorError as error:
                if not extended.has_warned_drift:
                    extended.has_warned_drift = True
                    logger.warning("%s", error)
            except (RuntimeError, ValueError):
                pass  # on JAX, a run in another thread has replaced an array


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

    def __init__(self, strategy: Strategy):
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
        _ = self.model  # on JAX, this access syncs the variables
        check_mirrored_variables(self._strategy, f"fit, batch {batch}")


class SyncTrainingState(keras.callbacks.Callback):
    """Starts all workers from the chief's state, and stops them together."""

    # It runs after the user's callbacks, as one of them may restore the chief's
    # variables from a backup that other workers cannot read.

    def __init__(self, strategy: Any):
        super().__init__()
        self._strategy, self._cluster = strategy, strategy.extended.cluster

    def on_train_begin(self, logs: Any = None) -> None:
        model = self.model
        epochs = self._cluster.exchange("the first epoch", model._initial_epoch)
        model._initial_epoch = epochs[0]
        variables = [*model.variables, *model.optimizer.variables]
        created = [v for v in variables if stored_value(v) is not None]
        ownership.broadcast_from_chief(self._strategy, created)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        stop = bool(self.model.stop_training)
        if any(check_same_values(self._strategy, self.model, stop)):
            self.model.stop_training = True


class SyncTrainingStatePerBatch(SyncTrainingState, LogFreeCallback):
    """Checks after each batch, too, whether a worker wants to stop."""

    # Where all want to stop after a batch, they do. Where only some do, all stop after
    # the next one, which the others have begun by then: no batch waits for the answer.
    # It is a separate class as Keras skips batch hooks that no callback overrides.

    def __init__(self, strategy: Any):
        super().__init__(strategy)
        self._stops = DelayedExchange(self._cluster, "whether to stop")

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        self._trained_model = model  # `self.model` would sync all variables on JAX

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        stop = bool(self._trained_model.stop_training)
        stops_late = any(self._stops.start(stop))
        stops_now = stop and all(self._stops.wait())
        self._trained_model.stop_training = stops_late or stops_now

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if any(self._stops.wait()):
            self.model.stop_training = True
        super().on_epoch_end(epoch, logs)


def check_same_values(
    strategy: Any,
    model: keras.Model,
    more: Any = None,
    operation: str = "the end of an epoch",
) -> list[Any]:
    """Compare a model's variables between workers; return each worker's `more`."""
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
        f"variable that differs is '{path}' (digests by worker: {groups}). Some code "
        "changed it only on some workers, such as a callback that not all workers have."
    )
