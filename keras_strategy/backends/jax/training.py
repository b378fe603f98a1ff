"""The steps of `fit`, `evaluate` and `predict`: with virtual replicas, and for audits.

Without them a step is one program over the rows of the global batch, in which XLA sums
in an order that depends on the devices.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
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
from keras_strategy.training import train_step as rules
from keras_strategy.training.ownership import strategy_of_model
from keras_strategy.training.row_weights import local_bounds, rows_to_read
from keras_strategy.values import PerReplica, ReduceOp


class VirtualFunction:
    """A train, test or predict function, called by Keras with a state and batches."""

    # The variables keep their values during the loop, so the state is empty.

    def __init__(
        self, model: keras.Model, kind: str, distribution: ReplicaDistribution
    ):
        self._model, self._kind, self._distribution = model, kind, distribution
        self._strategy: Any = strategy_of_model(model)
        self.policy = RowPolicy(model, kind, self._strategy)
        self._whole_step: Any = None
        self._returns_metrics = rules.returns_only_metrics(model, kind)
        self._weighted_step = rules.make_weighted_step(
            self._call_keras,
            self._returns_metrics,
            lambda: all_layers(model),
            self._require,
            (lambda tensor: tensor.shape[0]) if kind == "predict" else None,
        )
        # Conditions that a trace cannot decide, by the messages of their errors.
        self._conditions: dict[str, Any] = {}
        compiles = model.jit_compile and not model.run_eagerly
        self._options = RunOptions(compile=None if compiles else False)

    def __call__(self, state: Any, iterator: Iterator[Any]) -> Any:
        outputs = [self._audit_and_run(x) for x in self._next_batches(iterator)]
        if not outputs:
            raise StopIteration
        if self._kind == "predict" and len(outputs) > 1:
            join = lambda *parts: jnp.concatenate(parts)  # noqa: E731
            return tree.map_structure(join, *outputs), state
        return outputs[-1], state

    def _next_batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for batch in itertools.islice(iterator, self._model.steps_per_execution):
            if isinstance(batch, PartialBatchList or ()):
                yield from batch  # all steps
                return
            yield batch

    def _audit_and_run(self, batch: Any) -> Any:
        if not self.policy.is_done and self.policy.is_due():
            self.policy.audit(tree.map_structure(self._to_host, batch))
        return self._run_whole(batch) if self.policy.runs_whole else self._run(batch)

    def _run_whole(self, batch: Any) -> Any:
        """Run the step on all rows of a batch, on one device of each worker."""

        def on_one_device(array):
            if array is None:
                return None
            return put(array, self._distribution.everywhere).addressable_data(0)

        if self._whole_step is None:
            self._whole_step = getattr(self._model, f"{self._kind}_step")
            if self._options.compile is None:
                self._whole_step = jax.jit(self._whole_step)
        groups = self._variables()
        values = [[on_one_device(v.value) for v in variables] for variables in groups]
        data = tree.map_structure(on_one_device, batch)
        with device_step_scope(self._strategy):
            outputs, new_values = self._whole_step(tuple(values), data)
            if self._kind == "predict":
                groups, new_values = groups[1:], [new_values]
            for variables, arrays in zip(groups, new_values, strict=True):
                for variable, array in zip(variables, arrays, strict=True):
                    variable.assign(array)
        return outputs

    def _variables(self) -> list[Sequence[Any]]:
        """Return the variables of the step's state."""
        model = self._model
        groups = [model.trainable_variables, model.non_trainable_variables]
        if self._kind == "train":
            groups.append(model.optimizer.variables)
        if self._kind != "predict":
            groups.append(model.metrics_variables)
        return groups

    def _run(self, batch: Any) -> Any:
        """Run the step on a global batch; return merged logs, or predictions."""
        rows = rules.count_rows(batch)
        if rows % self._distribution.replicas == 0:
            local = self._join(batch)
        else:
            local = self._split(batch, rows)
        outputs, conditions = self._strategy.run(
            self._step, args=(local,), options=self._options
        )
        for message, condition in conditions.items():
            if not all(map(np.all, condition.values)):
                raise ValueError(message)
        if self._kind == "predict":
            return self._join_predictions(outputs, rows)
        if self._returns_metrics:
            with on_one_device(self._model.metrics_variables):
                return self._model.get_metrics_result()
        return tree.map_structure(self._first, outputs)

    def _to_host(self, array: Any) -> np.ndarray | None:
        if array is None:
            return None
        return np.asarray(put(array, self._distribution.everywhere).addressable_data(0))

    def _join(self, batch: Any) -> Any:
        """Return a batch that the replicas divide as distributed values."""

        def join(array):
            if array is None:
                return None
            return ShardedPerReplica(array, False, self._distribution)

        return tree.map_structure(join, batch)

    def _split(self, batch: Any, rows: int) -> LocalBatches:
        """Split a batch, of which each device has all rows, over the local replicas."""
        # A replica without rows gets the first row and the weight 0, since some metrics
        # do not accept a batch of 0 rows.
        distribution = self._distribution
        nothing = [None] * len(distribution.devices)
        leaves = [
            nothing if leaf is None else distribution.local_shards(leaf)
            for leaf in tree.flatten(batch)
        ]

        def local_batch(arrays: Sequence[Any], begin: int, end: int) -> _LocalBatch:
            part = slice(*rows_to_read([(begin, end)]))
            data = [None if array is None else array[part] for array in arrays]
            return _LocalBatch(tree.pack_sequence_as(batch, data), rows)

        bounds = local_bounds(distribution.topology, rows)
        by_replica = list(zip(*leaves, strict=True))
        batches = [
            local_batch(arrays, begin, end)
            for arrays, (begin, end) in zip(by_replica, bounds, strict=True)
        ]
        first = local_batch(by_replica[0], 0, -(-rows // distribution.replicas))
        return LocalBatches(batches, first, rows)

    def _step(self, local: Any) -> tuple[Any, dict[str, Any]]:
        """Run the step on a replica; return its outputs, and conditions to check."""
        replica: Any = distributed_replica()
        replicas, data = self._distribution.replicas, local
        if isinstance(local, _LocalBatch):
            data, total = local.data, local.global_rows
            count = rules.count_rows(data)
            first, weight = replica.id * -(-total // replicas), count / total
            # A replica without rows has the number of the last one.
            if isinstance(first, int):
                weight = weight if first < total else 0.0
                first = min(first, total - 1)
            else:
                weight = ops.where(first < total, weight, 0.0)
                first = ops.minimum(first, total - 1)
        else:
            count = rules.count_rows(data)
            first, total, weight = replica.id * count, replicas * count, 1 / replicas
        self._conditions = {}
        outputs = self._weighted_step(data, weight, RowRange(first, count, total))
        if self._returns_metrics:
            outputs = None  # the replicas' metrics have the values
        elif self._kind != "predict":
            outputs = rules.average_logs(
                outputs,
                [weight],
                lambda logs: [replica.all_reduce(ReduceOp.SUM, x) for (x,) in logs],
            )
        return outputs, self._conditions

    def _call_keras(self, data: Any) -> Any:
        """Call the model's step with the values of variables, and write new ones."""
        model, groups = self._model, self._variables()
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
        elif not condition:
            raise ValueError(message)

    def _join_predictions(self, outputs: Any, rows: int) -> Any:
        bounds = local_bounds(self._distribution.topology, rows)
        is_even = rows % self._distribution.replicas == 0

        def join(value):
            if not isinstance(value, PerReplica):
                return value
            if is_even and isinstance(value, ShardedPerReplica):
                return value.array
            pairs = zip(value.values, bounds, strict=True)
            values = [part for part, (begin, end) in pairs if end > begin]
            # A worker without rows takes part in the gather, too.
            values = values or [value.values[0][:0]]
            return self._strategy.extended.group.gather(values, axis=0)

        return tree.map_structure(join, outputs)

    def _first(self, value: Any) -> Any:
        """Return the first replica's component of a value that is equal on all."""
        return value.values[0] if isinstance(value, PerReplica) else value


@dataclass(frozen=True)
class _LocalBatch:
    """The local batch of a replica; a leaf for Keras's trees."""

    data: Any
    global_rows: int


jax.tree_util.register_dataclass(_LocalBatch, ["data"], ["global_rows"])


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
            groups = [model.trainable_variables, model.non_trainable_variables]
            if kind == "train":
                groups.append(model.optimizer.variables)
            if kind != "predict":
                groups.append(model.metrics_variables)
            state = tuple([v.value for v in variables] for variables in groups)
            data = tree.map_structure(keras.ops.convert_to_tensor, batch)
            outputs, new_state = getattr(model, f"{kind}_step")(state, data)
            if kind == "predict":
                return outputs
            for variables, values in zip(groups, new_state, strict=False):
                for variable, value in zip(variables, values, strict=True):
                    variable.assign(value)
            return outputs

        return step_on_replicas, step_on_device
