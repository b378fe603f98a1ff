"""The class of variables of a strategy, which hold native distributed variables."""

from typing import Any

import tensorflow as tf

from keras_strategy.backends.tensorflow.tensors import sum_values
from keras_strategy.core.context import distributed_replica
from keras_strategy.keras_patches.internals import current_stateless_scope, stored_value
from keras_strategy.keras_patches.patch import in_distributed_scope
from keras_strategy.keras_patches.variable_classes import (
    StrategyVariable,
    keras_value,
)
from keras_strategy.training.ownership import check_owner, strategy_of_variable
from keras_strategy.training.saving import overridden_value
from keras_strategy.training.sharding import flat_shards_of
from keras_strategy.training.variable_sync import is_sync_on_read, no_value_error

# TensorFlow's key of a variable's value in a checkpoint.
_VALUE = "VARIABLE_VALUE"

OVERRIDDEN = {
    "value": None,
    "handle": None,
    "_shared_name": None,
    "_initialize": "(self, value)",
    "_map_aggregation": "(self, aggregation)",
    "_serialize_to_tensors": "(self)",
    "_restore_from_tensors": "(self, restored_tensors)",
}


class MirroredVariable(StrategyVariable):
    """A variable of which each replica has a component, or a shard."""

    def _initialize(self, value: Any) -> None:
        """Create a replica's variable on all devices, and split an on_read value."""
        # So the first replica of a step can build layers, metrics and optimizers, which
        # are built in their first call.
        create = super()._initialize
        strategy = in_distributed_scope()
        if strategy is None:
            create(value)
            return

        def initialize():
            create(value)
            if is_sync_on_read(self):
                strategy.extended.group.split_initial_value(self)

        replica: Any = distributed_replica()
        if replica is None and tf.distribute.has_strategy():
            initialize()
            return
        if replica is None:  # an optimizer is built in a step that runs whole
            strategy.extended.group.call_outside(initialize)
            return
        if tf.is_tensor(value) and not isinstance(value, tf.Variable):
            constant = tf.get_static_value(value)
            if constant is None:
                raise ValueError(
                    "The initial value of a variable that is created inside "
                    "`strategy.run` must not depend on the replica's data. Create the "
                    f"variable outside, or pass an initializer. Received: {value!r}"
                )
            value = constant
        replica.once(initialize)

    def _map_aggregation(self, aggregation: str) -> Any:
        """Disable native aggregation of assignments."""
        # `Variable.assign` aggregates before the write, including what native variables
        # refuse: the mean of integers.
        if in_distributed_scope() is not None and not is_sync_on_read(self):
            aggregation = "none"
        return super()._map_aggregation(aggregation)

    @property
    def value(self) -> Any:
        """Read one aggregated value of an on_read or sharded variable."""
        # For "only_first_replica", native tf.distribute would read the first replica of
        # each worker.
        strategy = strategy_of_variable(self)
        if strategy is None:
            return keras_value(self)
        is_stateful = current_stateless_scope() is None
        is_sharded = is_stateful and flat_shards_of(self) is not None
        replica: Any = distributed_replica()
        if replica is not None:
            if self.aggregation == "sum":
                replica.step.sum_variables_read.add(id(self))
            running = replica.group.strategy
            if is_sharded:
                check_owner(running, self)
                return self._maybe_autocast(replica.full_value(self))
            if strategy is not running and is_stateful:
                if is_sync_on_read(self):
                    check_owner(running, self)
                elif replica.index >= len(strategy.extended.worker_devices):
                    # The variable has fewer components, which are all equal.
                    component = strategy.extended.group.components(self)[0]
                    return self._maybe_autocast(component)
            return keras_value(self)
        if not is_sharded and not is_sync_on_read(self):
            return keras_value(self)
        if not is_sharded and self.aggregation == "none":
            value = keras_value(self)
            if isinstance(value, tf.distribute.DistributedValues):
                raise no_value_error(self)
            return value
        group: Any = strategy.extended.group
        value = overridden_value(self)
        if value is None and is_sharded:
            value = group.full_value(self)
        elif value is None:
            is_first_only = self.aggregation == "only_first_replica"
            if group.workers is None or not is_first_only or not is_stateful:
                return keras_value(self)
            part = sum_values(group.local_summands(self))
            value = group.workers.sum(f"the value of '{self.path}'", part)
        return self._maybe_autocast(tf.convert_to_tensor(value))

    @property
    def handle(self) -> Any:
        """Explain why a gradient in cross-replica context fails."""
        try:
            return super().handle
        except ValueError as error:
            strategy = strategy_of_variable(self)
            if strategy is None or strategy.extended.topology.num_replicas == 1:
                raise
            raise RuntimeError(
                f"TensorFlow uses the variable '{self.path}' of {strategy!r} in the "
                "strategy's scope, but outside its replicas, where it is not a single "
                "variable. Put the step into a function that `strategy.run` calls, or "
                "use `keras_strategy.value_and_grad`."
            ) from error

    # In TensorFlow's checkpoints, sharded variables have their full values.

    @property
    def _shared_name(self) -> str:
        if flat_shards_of(self) is None:
            return super()._shared_name
        return stored_value(self)._shared_name

    def _serialize_to_tensors(self) -> dict[str, Any]:
        if flat_shards_of(self) is None:
            return super()._serialize_to_tensors()
        return {_VALUE: self.value}

    def _restore_from_tensors(self, restored_tensors: dict[str, Any]) -> Any:
        if flat_shards_of(self) is None:
            return super()._restore_from_tensors(restored_tensors)
        self.assign(restored_tensors[_VALUE])
        return self.value
