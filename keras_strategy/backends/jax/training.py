"""The steps of `fit`, `evaluate` and `predict`: with virtual replicas, and for audits.

Without them a step is one program over the rows of the global batch, in which XLA sums
in an order that depends on the devices.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import keras
import numpy as np
from jax.core import Tracer
from keras import ops, tree

from keras_strategy.audit.policy import RowPolicy
from keras_strategy.backends.jax import connection, internals
from keras_strategy.backends.jax.collectives import LocalBatches, ShardedPerReplica
from keras_strategy.backends.jax.distribution import (
    ReplicaDistribution,
    put,
    strategy_distribution,
)
from keras_strategy.backends.jax.patches_data import (
    GlobalBatches,
    PartialBatchList,
    local_predictions,
)
from keras_strategy.core.context import (
    device_step_scope,
    distributed_replica,
    thread_state,
)
from keras_strategy.core.protocols import AuditAdapter, Strategy
from keras_strategy.core.step_state import RowRange
from keras_strategy.keras_patches.internals import stored_value
from keras_strategy.keras_patches.layers import all_layers
from keras_strategy.options import RunOptions
from keras_strategy.training.batch_function import BatchFunction, LocalBatch
from keras_strategy.training.ownership import strategy_of_model
from keras_strategy.training.train_step import average_logs, count_rows
from keras_strategy.values import PerReplica, ReduceOp


class VirtualFunction(BatchFunction):
    """A train, test or predict function, called by Keras with a state and batches."""

    # The variables keep their values during the loop, so the state is empty.

    def __init__(
        self, model: keras.Model, kind: str, distribution: ReplicaDistribution
    ):
        strategy: Any = strategy_of_model(model)
        layers = functools.partial(all_layers, model)
        policy = RowPolicy(model, kind, strategy)
        super().__init__(model, kind, strategy, self._call_keras, layers, policy)
        self._distribution = distribution
        self._whole_step: Any = None
        # Conditions that a trace cannot decide, by the messages of their errors.
        self._conditions: dict[str, Any] = {}
        compiles = model.jit_compile and not model.run_eagerly
        self._options = RunOptions(compile=None if compiles else False)

    def __call__(self, state: Any, iterator: Iterator[Any]) -> Any:
        batches = self._next_batches(iterator)
        first = next(batches)  # raises StopIteration at the end
        return self.run_batches(itertools.chain([first], batches)), state

    def _next_batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for batch in itertools.islice(iterator, self._model.steps_per_execution):
            if isinstance(batch, PartialBatchList or ()):
                yield from batch  # all steps
                return
            yield batch

    def _local_copy(self, array: Any) -> Any:
        """Return an array on one device of this worker."""
        if array is None:
            return None
        return put(array, self._distribution.everywhere).addressable_data(0)

    def _to_host(self, batch: Any) -> Any:
        return tree.map_structure(
            lambda x: None if x is None else np.asarray(self._local_copy(x)), batch
        )

    def _run_whole(self, batch: Any) -> Any:
        # On one device of each worker.
        if self._whole_step is None:
            self._whole_step = getattr(self._model, f"{self._kind}_step")
            if self._options.compile is None:
                self._whole_step = jax.jit(self._whole_step)
        variables = state_variables(self._model, self._kind)
        values = [[self._local_copy(v.value) for v in group] for group in variables]
        data = tree.map_structure(self._local_copy, batch)
        with device_step_scope(self._strategy):
            outputs, new_values = self._whole_step(tuple(values), data)
            if self._kind == "predict":
                variables, new_values = variables[1:2], [new_values]
            _assign_all(variables, new_values)
        return outputs

    def _split(self, batch: Any) -> tuple[Any, list[Any]]:
        distribution, rows = self._distribution, count_rows(batch)
        replicas = distribution.replicas
        if rows % replicas == 0:  # no slices are needed

            def join(array):
                if array is None:
                    return None
                return ShardedPerReplica(array, False, distribution)

            weights = [1 / replicas] * len(distribution.devices)
            return tree.map_structure(join, batch), weights
        local, weights = super()._split(batch)
        # That of the first replica of all workers.
        rows_of_first = functools.partial(self._slice, 0, 0, -(-rows // replicas))
        data = tree.map_structure(rows_of_first, batch)
        first = LocalBatch(data, None, RowRange(None, None, rows))
        return LocalBatches(local.values, first, rows), weights

    def _slice(self, replica: int, begin: int, end: int, array: Any) -> Any:
        # Each device has all rows of a batch that the replicas do not divide.
        if array is None:
            return None
        return self._distribution.local_shards(array)[replica][begin:end]

    def _run_replicas(self, local_batches: Any) -> Any:
        outputs, conditions = self._strategy.run(
            self._step, args=(local_batches,), options=self._options
        )
        for message, condition in conditions.items():
            if not all(map(np.all, condition.values)):
                raise ValueError(message)
        return outputs

    def _call_step(self, local: Any) -> tuple[Any, dict[str, Any]]:
        """Run the step on a replica; return its outputs, and conditions to check."""
        replica: Any = distributed_replica()
        replicas = self._distribution.replicas
        if not isinstance(local, LocalBatch):  # each replica has as many rows
            count = count_rows(local)
            rows = RowRange(replica.id * count, count, replicas * count)
            local = LocalBatch(local, 1 / replicas, rows)
        elif local.weight is None:  # in a program, which is one for several replicas
            count, total = count_rows(local.data), local.rows.total
            first = replica.id * -(-total // replicas)
            weight = ops.where(first < total, count / total, 0.0)
            rows = RowRange(ops.minimum(first, total - 1), count, total)
            local = LocalBatch(local.data, weight, rows)
        self._conditions = {}
        outputs = super()._call_step(local)
        if self._returns_metrics:
            outputs = None  # the replicas' metrics have the values
        elif self._kind != "predict":
            outputs = average_logs(
                outputs,
                [local.weight],
                lambda logs: [replica.all_reduce(ReduceOp.SUM, x) for (x,) in logs],
            )
        return outputs, self._conditions

    def _call_keras(self, data: Any) -> Any:
        """Call the model's step with the values of variables, and write new ones."""
        model, groups = self._model, state_variables(self._model, self._kind)
        values = tuple([variable.value for variable in group] for group in groups)
        outputs, new_values = getattr(model, f"{self._kind}_step")(values, data)
        if self._kind == "predict":
            new_values = values[0], new_values
        for variables, *pair in zip(groups, values, new_values, strict=True):
            for variable, before, after in zip(variables, *pair, strict=True):
                if after is not before:
                    internals.write(variable, after)
        return outputs

    def _require(self, condition: Any, message: str) -> None:
        if isinstance(condition, Tracer):
            self._conditions[message] = condition
        else:
            super()._require(condition, message)

    def _merge_logs(self, logs: Any, weights: list[Any]) -> Any:
        if self._returns_metrics:
            with on_one_device(self._model.metrics_variables):
                return self._model.get_metrics_result()
        return tree.map_structure(  # equal on all replicas
            lambda x: x.values[0] if isinstance(x, PerReplica) else x, logs
        )

    def _join_rows(self, value: Any, weights: list[Any], is_global: bool) -> Any:
        if isinstance(value, ShardedPerReplica) and min(weights) > 0:
            return value.array
        return super()._join_rows(value, weights, is_global)


# In a program, only the data and the number of all rows are known.
jax.tree_util.register_pytree_node(
    LocalBatch,
    lambda local: ([local.data], local.rows.total),
    lambda total, data: LocalBatch(data[0], None, RowRange(None, None, total)),
)


def state_variables(model: keras.Model, kind: str) -> list[Sequence[Any]]:
    """Return the variables of the state of a model's step."""
    groups = [model.trainable_variables, model.non_trainable_variables]
    if kind == "train":
        groups.append(model.optimizer.variables)
    if kind != "predict":
        groups.append(model.metrics_variables)
    return groups


def _assign_all(groups: Sequence[Sequence[Any]], values: Any) -> None:
    for variables, arrays in zip(groups, values, strict=True):
        for variable, array in zip(variables, arrays, strict=True):
            variable.assign(array)


def on_one_device(variables: Sequence[Any]) -> AbstractContextManager[Any]:
    """Return a context in which operations with variables compute on one device."""
    # On all devices, XLA may compile them differently for other numbers of devices.
    arrays = [stored_value(v).addressable_data(0) for v in variables]
    return keras.StatelessScope(state_mapping=list(zip(variables, arrays, strict=True)))


def make_step_function(
    strategy: Any, model: keras.Model, kind: str, make: Callable[[], Any]
) -> Any:
    """Wrap the function that `make` returns, or replace it for virtual replicas."""
    # Workers report where they wait, and the outputs are replicated on all workers,
    # since Keras or a callback reads them. Variables on a home device are copied to all
    # devices and back.
    distribution = strategy_distribution(strategy)
    if distribution is None:
        return make()
    if distribution.per_device is None:
        function = _global_step(strategy, make())
    else:
        function = VirtualFunction(model, kind, distribution)
    if distribution.home is not None:
        return _home_step(function, distribution)
    if distribution.cluster is not None:
        return _multi_worker_step(function, kind, distribution)
    return function


def _global_step(strategy: Any, step: Callable) -> Callable:
    def function(state, iterator):
        # Without a context manager, which takes more calls in each step.
        thread_state.device_step = strategy
        try:
            return step(state, iterator)
        finally:
            thread_state.device_step = None

    return function


def _home_step(step: Callable, distribution: Any) -> Callable:
    def function(state, iterator):
        # Keras's program takes variables on all devices.
        outputs, state = step(distribution.from_home(state), iterator)
        return outputs, distribution.to_home(state)

    return function


def _multi_worker_step(step: Callable, kind: str, distribution: Any) -> Callable:
    client = distribution.cluster.client
    previous: list[Any] = []

    def function(state, iterator):
        with client.track_operation(f"the {kind} step"):
            # Python prepares one step while the devices run the previous one.
            jax.block_until_ready(previous)
            outputs, state = step(state, iterator)
            rows = isinstance(iterator, GlobalBatches) and iterator.pop_consumed()
            if rows and kind == "predict":
                select = functools.partial(local_predictions, distribution, rows)
                outputs = tree.map_structure(select, outputs)
            else:
                outputs = tree.map_structure(replicate, outputs)
            previous[:] = [outputs]
            if kind == "predict" or distribution.synchronous:
                jax.block_until_ready(outputs)
        return outputs, state

    def replicate(x):
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return put(x, distribution.everywhere)
        return x

    return function


class StepAccess(AuditAdapter):
    """Access to the backend's state and a model's steps, for `keras_strategy.audit`."""

    # `fit` is one program, from which no gradient can be read.
    records_steps = False

    def host_copy(self, x: Any) -> np.ndarray | None:
        if isinstance(x, Tracer) or not keras.ops.is_tensor(x):
            return None
        return np.array(x)

    def run_on_device(
        self, strategy: Strategy, fn: Callable[[], Any], variables: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        device = connection.device_named(strategy.extended.worker_devices[0])
        mapping = [
            (variable, jax.device_put(np.array(variable.value), device))
            for variable in variables
            if (variable.synchronization, variable.aggregation) != ("on_read", "none")
        ]
        with (
            device_step_scope(strategy),
            keras.device(device),
            keras.StatelessScope(state_mapping=mapping) as scope,
        ):
            is_tensor = keras.ops.is_tensor
            result = tree.map_structure(
                lambda x: np.array(x) if is_tensor(x) else x, fn()
            )
        after = (scope.get_current_value(variable) for variable in variables)
        return result, [None if value is None else np.array(value) for value in after]

    def step_functions(
        self, model: keras.Model, kind: str, strategy: Strategy
    ) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        def step_on_replicas(batch):
            if kind == "predict":
                return model.predict_on_batch(batch[0])
            call = model.train_on_batch if kind == "train" else model.test_on_batch
            return call(*batch, return_dict=True)

        def step_on_device(batch):
            groups = state_variables(model, kind)
            state = tuple([v.value for v in variables] for variables in groups)
            data = tree.map_structure(keras.ops.convert_to_tensor, batch)
            outputs, new_state = getattr(model, f"{kind}_step")(state, data)
            if kind != "predict":
                _assign_all(groups, new_state)
            return outputs

        return step_on_replicas, step_on_device
