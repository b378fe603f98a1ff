"""Runner of the functions of an eager `run`."""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
from keras import tree

from keras_strategy.backends.jax import hooks_state as keras_state
from keras_strategy.backends.jax.distribution import ReplicaDistribution, put
from keras_strategy.backends.jax.on_read import set_local_values
from keras_strategy.backends.jax.threaded_replica import (
    EagerReplica,
    InitialValues,
    ThreadScope,
)
from keras_strategy.backends.jax.workers import JaxWorkers
from keras_strategy.backends.threads.hooks import (
    ThreadState,
    keep_global_seed_generator,
)
from keras_strategy.backends.threads.team import ReplicaThreads
from keras_strategy.backends.threads.turns import TurnScheduler
from keras_strategy.core import context
from keras_strategy.core.components import unwrap_variables
from keras_strategy.core.own_attributes import GroupAttributes, ReplicaAttributes
from keras_strategy.core.row_range import row_ranges
from keras_strategy.core.step_state import StepState
from keras_strategy.hooks.adoption import adopt
from keras_strategy.hooks.variables import stored_dtype
from keras_strategy.rules.aggregation import is_sync_on_read
from keras_strategy.rules.batches import find_batch_rows, traced_run_state
from keras_strategy.rules.draws import BatchDimCache
from keras_strategy.values.distributed import (
    is_numeric_array,
    regroup,
    select_replica,
)

if TYPE_CHECKING:
    from keras_strategy.core.strategy import Strategy


class EagerRunner:
    """Runner that calls functions on the replicas of one group in turns."""

    def __init__(
        self,
        strategy: "Strategy",
        devices: tuple[str, ...],
        distribution: ReplicaDistribution,
        workers: JaxWorkers | None,
    ):
        self._strategy = strategy
        self._devices = devices
        self._distribution = distribution
        self._workers = workers
        self._team = ReplicaThreads(devices)
        self._attributes = GroupAttributes(len(devices), keras.ops.is_tensor)
        self._lock = threading.Lock()

    def run(
        self, fn: Callable[..., Any], args: tuple, kwargs: dict, draws: BatchDimCache
    ) -> Any:
        """Implement `ReplicaGroup.run`; `draws` are the function's random draws."""
        with self._lock:  # one run at a time
            initial_values = InitialValues(self._strategy, self._distribution)
            turns, attributes = TurnScheduler(len(self._devices)), self._attributes.begin()
            replicas = [
                EagerReplica(
                    self._strategy,
                    index,
                    self._distribution.topology,
                    turns,
                    attributes[index],
                    device,
                    initial_values,
                    self._workers,
                )
                for index, device in enumerate(self._distribution.devices)
            ]
            batch = find_batch_rows(args, kwargs)
            if batch is not None and batch.counts is not None:
                rows = row_ranges(batch.counts)[batch.first :]
                for replica in replicas:
                    index = replica.index
                    replica.step = traced_run_state(
                        fn, (args, kwargs), rows[index], index, draws
                    )
            state = ThreadState.capture()
            try:
                outputs = self._team.call(
                    turns,
                    [
                        functools.partial(_run_replica, *pair, state, fn, args, kwargs)
                        for pair in zip(replicas, attributes, strict=True)
                    ],
                )
            finally:
                for replica in replicas:  # free the state despite reference cycles
                    replica.step = StepState()
            self._commit([replica.scope for replica in replicas])
            self._attributes.commit(attributes)
            keep_global_seed_generator(turns.seed_generator)
        return regroup(
            outputs, keras.ops.is_tensor, always_distributed=self._workers is not None
        )

    def _commit(self, scopes: Sequence[ThreadScope]) -> None:
        """Write the replicas' assignments after all of them have succeeded."""
        written: dict[int, Any] = {}
        for scope in scopes:
            written.update(scope.written)
        seeds = [v for v in written.values() if keras_state.is_global_seed(v)]
        others = [v for v in written.values() if not keras_state.is_global_seed(v)]
        adopt(self._strategy, others)
        for variable in seeds:
            value = scopes[0].get_current_value(variable)
            keras_state.release(variable, value)
        for variable in others:
            values = [
                jax.device_put(
                    jnp.asarray(
                        scope.get_current_value(variable), stored_dtype(variable)
                    ),
                    device,
                )
                for scope, device in zip(
                    scopes, self._distribution.devices, strict=True
                )
            ]
            if is_sync_on_read(variable):
                set_local_values(variable, values, self._distribution)
            else:
                array = self._distribution.global_array(
                    values[0].shape, self._distribution.everywhere, values
                )
                array = put(array, self._distribution.stored_sharding(variable))
                keras_state.set_array(variable, array)


def _run_replica(
    replica: EagerReplica,
    attributes: ReplicaAttributes,
    state: ThreadState,
    fn: Callable[..., Any],
    args: tuple,
    kwargs: dict,
) -> Any:
    def place(leaf):
        if isinstance(leaf, jax.Array) or is_numeric_array(leaf):
            return replica.here(jnp.asarray(leaf))
        return leaf

    with (
        state.applied(),
        jax.default_device(replica.device),
        context.replica_scope(replica.context),
        replica.scope,
        attributes.in_turn(),
    ):
        replicas = len(replica.topology.devices)
        selected = select_replica((args, kwargs), replica.index, replicas)
        args, kwargs = tree.map_structure(place, selected)
        output = unwrap_variables(fn(*args, **kwargs))
        # Nothing is written before every replica has succeeded.
        replica.exchange("the end of the function", None, lambda _: None)
        return output
