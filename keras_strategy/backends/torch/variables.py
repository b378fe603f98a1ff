"""Classes of the variables of a strategy with several replicas.

The methods that are overridden are checked like patches.
"""

from typing import Any

import keras

from keras_strategy.backends.threads.patches import ReplicaScope
from keras_strategy.keras_patches.internals import global_state
from keras_strategy.keras_patches.patch import (
    find_module,
    in_distributed_scope,
    keras_changed_error,
)
from keras_strategy.keras_patches.variable_classes import (
    StrategyVariable,
    check_overridden,
    keras_value,
    set_kind,
)
from keras_strategy.training import ownership
from keras_strategy.training.saving import overridden_value
from keras_strategy.training.variable_sync import is_sync_on_read

COMPONENTS = "_ks_components"

AutocastScope: Any = find_module(
    "AutocastScope", "keras.src.backend.common.variables"
).AutocastScope


class MirroredVariable(StrategyVariable):
    """A variable of which each replica has a component."""

    @property
    def value(self) -> Any:
        # Called very often, so the settings are read inline. `clear_session` replaces
        # the tracker, so look it up.
        settings = global_state.GLOBAL_STATE_TRACKER
        scope: Any = getattr(settings, "stateless_scope", None)
        if scope is None:
            if not ownership.pending_values:
                return self._cross_replica_value()
            ownership.broadcast_pending_values()
            return self.value  # it may be sharded now
        if (
            not isinstance(scope, ReplicaScope)
            or getattr(settings, "torch_device", None) != scope.device
        ):
            return keras_value(self)
        components, tensor = self.__dict__.get(COMPONENTS), self._value
        if (
            components is None
            or components.is_tracked
            or scope.replica is not scope  # it does not write in place
            or components.layout is not scope.layout
            or (
                scope.step.is_applying
                and not scope.is_partly_updated
                and id(tensor) not in scope.overwritten
            )
        ):
            tensor = scope.get_current_value(self)
            if tensor is None:
                return keras_value(self)
        if getattr(settings, "autocast_scope", None) is None:
            return tensor  # what Keras returns after ten calls
        return self._maybe_autocast(tensor)

    def _cross_replica_value(self) -> Any:
        return keras_value(self)

    def _initialize(self, value: Any) -> None:
        """Register the initial value, which becomes the chief's on every worker."""
        self.__dict__.pop(COMPONENTS, None)
        super()._initialize(value)
        retype(self)
        strategy = in_distributed_scope()
        if strategy is not None:
            strategy.extended.group.note_initialized(self)

    def _direct_assign(self, value: Any) -> None:
        """Assign to all components in cross-replica context."""
        if COMPONENTS not in vars(self):
            ownership.broadcast_pending_values()  # after which it may be sharded
        components = vars(self).get(COMPONENTS)
        if components is None:
            super()._direct_assign(value)
        else:
            components.assign(self, value)


class SyncOnReadVariable(MirroredVariable):
    """A variable of which each replica has its own value until it is read."""

    def _cross_replica_value(self) -> Any:
        components = self.__dict__.get(COMPONENTS)
        if components is None:
            return keras_value(self)
        value = overridden_value(self)
        if value is None:
            value = components.aggregated_value(self)
        return self._maybe_autocast(value)


class ShardedVariable(MirroredVariable):
    """A variable of which each replica stores a shard."""

    @property
    def value(self) -> Any:
        if getattr(global_state.GLOBAL_STATE_TRACKER, "torch_device", None) == "meta":
            return keras_value(self)
        full = self.__dict__[COMPONENTS].current_value(self)
        return keras_value(self) if full is None else self._maybe_autocast(full)


def retype(variable: Any, kind: Any = None) -> None:
    """Make a variable one of a kind, by default that of its synchronization."""
    if kind is None:
        kind = SyncOnReadVariable if is_sync_on_read(variable) else MirroredVariable
    set_kind(variable, kind)


def check_keras() -> None:
    """Raise `KerasVersionError` if Keras changed what the classes override or read."""
    method = "(self, value)"
    check_overridden({"value": None, "_initialize": method, "_direct_assign": method})
    settings = global_state.GLOBAL_STATE_TRACKER
    names = ("stateless_scope", "autocast_scope", "torch_device")
    scope, cast = keras.StatelessScope(initialize_variables=False), AutocastScope(None)
    with scope, cast, keras.device("meta"):
        found = [getattr(settings, name, None) for name in names]
    if found != [scope, cast, "meta"]:
        raise keras_changed_error("Variable.value", "reads other settings")
