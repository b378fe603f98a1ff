"""Stateless scopes of replicas that are threads of one process.

Keras sends every read and assignment of a variable to the thread's `StatelessScope`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_strategy.core.protocols import Replica
from keras_strategy.devices import ReplicaTopology
from keras_strategy.training.variable_sync import (
    is_sync_on_read,
    split_for_local_replicas,
)


class WritesInPlace:
    """A replica that writes variables in place, without a `StatelessScope`."""


class ReplicaScope(keras.StatelessScope):
    """The variables as one replica sees them.

    What it assigns stays in `state_mapping` until all replicas have succeeded.
    """

    def __init__(self, replica: Replica):
        super().__init__(collect_losses=True, initialize_variables=False)
        self.replica = replica


class MergedScope(keras.StatelessScope):
    """The variables as a `merge_call` sees them: those of all replicas.

    `aggregate` returns a sync-on-read variable's value, given the local replicas'.
    """

    def __init__(
        self,
        scopes: Sequence[ReplicaScope],
        aggregate: Callable[[Any, Sequence[Any]], Any],
        topology: ReplicaTopology,
    ):
        super().__init__(initialize_variables=False)
        self._scopes, self._aggregate, self._topology = scopes, aggregate, topology

    def components(self, variable: Any) -> list[Any]:
        """Return each replica's value of a variable."""
        return [s.get_current_value(variable) for s in self._scopes]

    def assign_components(self, variable: Any, values: Sequence[Any]) -> None:
        """Set each replica's value of a variable."""
        for scope, value in zip(self._scopes, values, strict=True):
            scope.add_update((variable, value))

    def get_current_value(self, variable: Any) -> Any:
        values = self.components(variable)
        if any(value is None for value in values):
            return None
        if is_sync_on_read(variable) and variable.aggregation != "none":
            return self._aggregate(variable, values)
        return values[0]

    def add_update(self, update: tuple[Any, Any]) -> None:
        parts = split_for_local_replicas(*update, self._topology)
        self.assign_components(update[0], parts)


def unbuilt_variable_error(variable: Any) -> RuntimeError:
    """Return the error for a variable created in a replica, without a value."""
    return RuntimeError(
        f"The variable '{variable.path}' is used before it has a value. "
        "Build the layer or model before it is used in `strategy.run`."
    )
