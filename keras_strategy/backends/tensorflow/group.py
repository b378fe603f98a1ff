"""The replicas of one strategy, on top of a native tf.distribute strategy.

Native tf.distribute mirrors the variables and calls a function once per replica, in
one thread each. The threads take turns, replica 0 first, and switch only in a
`merge_call`. This module adds the replica context of our core, one compiled function
per step, and checks before values are combined.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree
from tensorflow.python.distribute.values import Mirrored as NativeMirrored

from keras_strategy.backends.tensorflow import compile_cache, tensors
from keras_strategy.backends.tensorflow.collectives import (
    TensorFlowWorkers,
    Verify,
    gather_over_workers,
)
from keras_strategy.backends.tensorflow.connection import native_name
from keras_strategy.backends.tensorflow.native_strategies import (
    NativeMirroredStrategy,
    NativeMultiWorkerStrategy,
)
from keras_strategy.backends.tensorflow.random import SeedGenerators
from keras_strategy.backends.tensorflow.replica import (
    RunState,
    TensorFlowReplica,
    gather_shards,
    local_shard,
)
from keras_strategy.backends.tensorflow.variables import MirroredVariable
from keras_strategy.backends.threads.pool import propagate_interrupts
from keras_strategy.core import context
from keras_strategy.core.context import ReplicaContext
from keras_strategy.core.per_replica_attributes import GroupAttributes
from keras_strategy.core.protocols import Strategy
from keras_strategy.core.registry import get_engine
from keras_strategy.core.step_state import RowRange, StepState, row_ranges
from keras_strategy.core.variable_components import ComponentGroup
from keras_strategy.devices import ReplicaTopology
from keras_strategy.keras_patches.internals import (
    byte_count,
    initialize,
    stored_dtype,
    stored_value,
)
from keras_strategy.keras_patches.random import (
    dry_run_layer,
    global_generator,
    layer_draws,
    set_global_generator,
)
from keras_strategy.keras_patches.sharded_slots import shard_adopted_slot
from keras_strategy.keras_patches.variable_classes import set_kind
from keras_strategy.options import RunOptions
from keras_strategy.training import reduction, train_step, variable_sync
from keras_strategy.training.compile_cache import CompileCache
from keras_strategy.training.cross_device_ops import CrossDeviceOps
from keras_strategy.training.random import BatchDimCache
from keras_strategy.training.sharding import FlatShards, flat_shards_of, set_flat_shards
from keras_strategy.values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    ReduceOp,
    regroup,
    select_replica,
)


class TensorFlowGroup(ComponentGroup):
    # `cross_device_ops` applies to a single worker; None lets the backend choose.
    def __init__(
        self,
        strategy: Strategy,
        devices: tuple[str, ...],
        cross_device_ops: CrossDeviceOps | None = None,
        workers: TensorFlowWorkers | None = None,
    ):
        self.devices = devices
        self._first_device = native_name(devices[0])  # combines the replicas' values
        self.strategy = strategy
        self.workers: TensorFlowWorkers | None = workers
        self.topology = ReplicaTopology(devices, workers)
        self.native: Any
        if workers is None:
            self.native = NativeMirroredStrategy(
                devices, cross_device_ops, strategy.parameter_device
            )
        else:
            self.native = NativeMultiWorkerStrategy(devices, workers)
        self.seeds = SeedGenerators(self.call_outside, workers)
        self.builds = 0  # how often a replica has created or built something
        self._attributes = GroupAttributes(self.strategy, len(devices), tf.is_tensor)
        self._functions = CompileCache(lambda: compile_cache.CompiledFunction(self))
        self.reductions = compile_cache.RunReductions()

    def scope(self):
        return self.native.scope()

    def note_created(self, variable: Any) -> None:
        set_kind(variable, MirroredVariable)

    def adopt(self, variables: Sequence[Any]) -> None:
        with tf.init_scope(), self.scope():
            for variable in variables:
                set_kind(variable, MirroredVariable)
                value = stored_value(variable)
                if isinstance(value, tf.distribute.DistributedValues):
                    continue
                initialize(variable, lambda value=value: tf.convert_to_tensor(value))
                # Optimizers look up the variables of `build` by this id.
                self.stored_components(variable)[0]._unique_id = value._unique_id
                if variable_sync.is_sync_on_read(variable):
                    self.split_initial_value(variable)
                shard_adopted_slot(self.strategy, variable)

    def share(self, variable: Any, shares: FlatShards) -> None:
        with tf.init_scope(), self.scope():
            full = tf.convert_to_tensor(self.stored_components(variable)[0])
            local = self.topology.local_replicas
            shards = [local_shard(full, shares, replica) for replica in local]
            self.native.extended.shards = shards
            try:
                initialize(variable, lambda: shards[0])
            finally:
                self.native.extended.shards = None
        set_flat_shards(variable, shares)

    def full_value(self, variable: Any) -> Any:
        """Return the value of a sharded variable; all workers must call it."""
        shares, name = flat_shards_of(variable), f"the value of '{variable.path}'"
        assert shares is not None
        with self.collective_scope(name), tf.device(self._first_device):
            components = self.stored_components(variable)
            shards = [[tf.convert_to_tensor(shard)] for shard in components]
            return gather_shards(shards, [shares], self.workers, name)[0]

    # Variables are equal when they are created, but the chief may restore others.
    def initial_value(self, variable: Any) -> Any:
        return tf.convert_to_tensor(self.components(variable)[0])

    def set_initial_value(self, variable: Any, value: Any) -> None:
        for component in self.components(variable):
            component.assign(value)

    def trainer_scope(
        self, model: Any, method: str, arguments: dict[str, Any]
    ) -> AbstractContextManager[Any]:
        return compile_cache.reraise_failed_checks()

    def check_cross_replica_apply(self) -> None:
        raise RuntimeError(
            "`optimizer.apply` was called outside the replicas of "
            f"{self.strategy!r}. Call it inside the function that "
            "`strategy.run` runs, where it sums the replicas' gradients."
        )

    def components(self, variable: Any) -> tuple[Any, ...]:
        if flat_shards_of(variable) is not None:
            return (self.full_value(variable),) * len(self.devices)
        return self.stored_components(variable)

    def stored_components(self, variable: Any) -> tuple[Any, ...]:
        """Return what each local replica stores: its component or its shard."""
        return tuple(self.native.experimental_local_results(stored_value(variable)))

    def local_bytes(self, variable: Any) -> tuple[int, ...]:
        parameter_device = self.strategy.parameter_device
        shares = flat_shards_of(variable)
        if shares is not None:
            size = np.dtype(stored_dtype(variable)).itemsize
            local = self.topology.local_replicas
            return tuple(size * shares.size_of(replica) for replica in local)
        size = byte_count(variable)
        if parameter_device is None:
            return (size,) * len(self.devices)
        total = size * len(self.devices)
        return tuple(total if x == parameter_device else 0 for x in self.devices)

    def local_shards(self, variable: Any) -> list[tuple[int, Any]]:
        shares = flat_shards_of(variable)
        assert shares is not None
        local = self.topology.local_replicas
        parts = zip(local, self.stored_components(variable), strict=True)
        return [
            (shares.bounds[replica][0], component)
            for replica, component in parts
            if shares.size_of(replica)
        ]

    def local_summands(self, variable: Any) -> list[Any]:
        components = [tf.convert_to_tensor(c) for c in self.components(variable)]
        return variable_sync.local_summands(variable, components, self.topology)

    def assign(self, variable: Any, value: Any) -> None:
        parts = variable_sync.split_for_local_replicas(variable, value, self.topology)
        self.assign_components(variable, parts)

    def split_initial_value(self, variable: Any) -> None:
        """Split an on_read variable's initial value, which every component has."""
        with tf.init_scope():
            value = tf.convert_to_tensor(self.components(variable)[0])
            self.assign(variable, value)

    def assign_components(self, variable: Any, values: Sequence[Any]) -> None:
        shares, local = flat_shards_of(variable), self.topology.local_replicas
        for replica, component, value in zip(
            local, self.stored_components(variable), values, strict=True
        ):
            if shares is not None:
                value = local_shard(tf.convert_to_tensor(value), shares, replica)
            component.assign(tf.cast(value, component.dtype))

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple,
        kwargs: dict,
        options: RunOptions,
        scope: Callable[[], AbstractContextManager[Any]],
    ) -> Any:
        with scope(), compile_cache.reraise_failed_checks():
            if options.compile is False:
                with self.collective_scope("strategy.run"):
                    return self.call(fn, args, kwargs)
            if tf.inside_function() or tf.config.functions_run_eagerly():
                return self.call(fn, args, kwargs)
            with self.collective_scope("strategy.run"):
                compiled = self._functions.get(fn)
                traces = compiled.traces
                try:
                    result = compiled(fn, args, kwargs)
                except tf.errors.OperatorNotAllowedInGraphError:
                    if compiled.is_converted:
                        raise
                    compiled.convert()
                    result = compiled(fn, args, kwargs)
                if compiled.traces > traces:
                    self._functions.refresh(fn)
                return result

    def owns_native(self, variable: Any) -> bool | None:
        return get_engine().owns_native(variable, self.native)

    def update(
        self, variable: Any, fn: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Any:
        if not isinstance(variable, tf.Variable):
            return super().update(variable, fn, args, kwargs)
        args, kwargs = tree.map_structure(
            lambda x: (
                NativeMirrored(x.values) if isinstance(x, DistributedValues) else x
            ),
            (args, kwargs),
        )
        update = self.native.extended.update
        results = update(variable, fn, args, kwargs, group=False)
        results = [tree.map_structure(_read, result) for result in results]
        return regroup(results, tf.is_tensor, Mirrored, always_distributed=True)

    def collective_scope(self, name: str) -> AbstractContextManager[Any]:
        if self.workers is None:
            return contextlib.nullcontext()
        return self.workers.collective_scope(name)

    def call_outside(self, fn: Callable[[], Any], in_scope: bool = True) -> Any:
        """Call `fn` eagerly in cross-replica context while the replicas wait."""
        # A variable that one replica's thread creates would have to be created by all
        # threads together. Here it exists on all devices when the first replica
        # continues, and the other replicas find it.
        no_scope = context.cross_replica_scope(None)
        return _call_in_thread(fn, self.strategy.scope() if in_scope else no_scope)

    def call_once(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        # Outside of the native strategy, its variables write to all components.
        fn, generator = _convert(fn), global_generator()
        is_eager = tf.executing_eagerly()
        graph = None if is_eager else tf.compat.v1.get_default_graph()

        @tf.autograph.experimental.do_not_convert
        def call():
            set_global_generator(generator)
            with (
                contextlib.nullcontext() if graph is None else graph.as_default(),
                tf.device(self._first_device),
            ):
                return fn(*args, **kwargs)

        return _call_in_thread(call, context.device_step_scope(self.strategy))

    def call(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Call `fn` on every replica, without compiling it."""
        if isinstance(fn, tf.types.experimental.GenericFunction):
            # Replicas cannot run collectives inside a tf.function of each.
            fn = fn.python_function  # pyright: ignore[reportAttributeAccessIssue]
        return self._call_in_turns(_convert(fn), args, kwargs)

    @tf.autograph.experimental.do_not_convert
    def _call_in_turns(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        policy, replicas = keras.config.dtype_policy(), len(self.devices)
        outputs: list[Any] = [None] * replicas
        attributes = self._attributes.begin()
        run_state = RunState([None] * replicas, global_generator(), attributes)
        threads: list[threading.Thread] = []
        steps = self._step_states(fn, args, kwargs)

        @tf.autograph.experimental.do_not_convert
        def replica_fn(args, kwargs):
            keras.config.set_dtype_policy(policy)  # Keras stores it per thread
            threads.append(threading.current_thread())
            replica = TensorFlowReplica(self, run_state)
            if steps is not None:
                replica.step = steps[replica.index]
            with (
                context.replica_scope(ReplicaContext(self.strategy, replica)),
                attributes[replica.index].in_turn(),
            ):
                args, kwargs = select_replica((args, kwargs), replica.index, replicas)
                result = fn(*args, **kwargs)
                variable_sync.average_statistics(replica)
                outputs[replica.index] = tree.map_structure(_read, result)

        try:
            with propagate_interrupts(threads):
                self.native.run(replica_fn, args=(args, kwargs))
        except Exception as error:
            if tf.executing_eagerly():
                error.add_note(
                    "The function was not compiled: what the replicas assigned to "
                    "variables before this error stays assigned."
                )
            calls_differ = "a different number of replica_context().merge_call()"
            if calls_differ in str(error):
                # An earlier replica's Python code changes what a later one finds.
                error.add_note(
                    "All replicas must take the same branches. They run in turns, so "
                    "what the first one builds is already built for the next one: "
                    "build layers and optimizers before `strategy.run`, or call them "
                    "without checking whether they are built."
                )
            raise
        self._attributes.commit(attributes)
        if run_state.has_drawn:
            self.seeds.finish(self.components(self.seeds.replicas.state)[0])
        return regroup(outputs, tf.is_tensor, always_distributed=True)

    def _step_states(
        self, fn: Callable[..., Any], args: tuple, kwargs: dict
    ) -> list[StepState] | None:
        """Return the replicas' step states if the arguments are rows of a batch."""
        batch = train_step.find_batch_rows(args, kwargs)
        if batch is None:
            return None
        if self.workers is None:
            values = filter(train_step.has_batch_rows, tree.flatten((args, kwargs)))
            values = [x for x in values if x.values[0].shape.rank != 0]
            if not values:
                return None
            # Use numbers where a trace knows them, as it knows the shapes of what is
            # drawn.
            counts: list[Any] = [
                tensors.rows_of_tensor(part) if part.shape[0] is None else part.shape[0]
                for part in values[0].values
            ]
            total = sum(counts)
            rows = [
                RowRange(sum(counts[:replica]), count, total)
                for replica, count in enumerate(counts)
            ]
        elif batch.counts is not None:
            last = batch.first + len(self.devices)
            rows = row_ranges(batch.counts)[batch.first : last]
        else:
            return None
        if not tf.inside_function():
            return [
                StepState(rows=row_range, draws=layer_draws, dry_run=dry_run_layer)
                for row_range in rows
            ]
        draws = BatchDimCache()
        return [
            train_step.traced_run_state(fn, (args, kwargs), row_range, index, draws)
            for index, row_range in enumerate(rows)
        ]

    def reduce(self, reduce_op: ReduceOp, value: DistributedValues, axis: Any) -> Any:
        def compute():
            return self.compute_reduce(reduce_op, value, axis)

        if axis is None and not tf.inside_function():
            return self.reductions.reduce(reduce_op, value, compute)
        return compute()

    def compute_reduce(
        self, reduce_op: ReduceOp, value: DistributedValues, axis: Any
    ) -> Any:
        name, workers = "strategy.reduce", self.workers

        def sum_over_workers(local):
            return local if workers is None else workers.sum_all(name, [local])[0]

        with self.collective_scope(name), tf.device(self._first_device):
            values: list[Any] = [
                x if isinstance(x, tf.IndexedSlices) else reduction.cast_for_sum(x)
                for x in map(tensors.convert_to_reducible, value.values)
            ]
            if axis is None:
                # Also sparse ones and those of unknown rank.
                tensors.check_same_layout(values)
                total = sum_over_workers(tensors.sum_values(values))
                if reduce_op is ReduceOp.SUM:
                    return total
                return tensors.divide(total, self.topology.num_replicas)
            axes = reduction.axes_to_reduce(axis, [x.shape for x in values])
            reduction.check_same_dtype(values)
            total = tensors.sum_values([tf.reduce_sum(x, axes) for x in values])
            total = sum_over_workers(total)
            if reduce_op is ReduceOp.SUM:
                return total
            is_static = all(x.shape[i] is not None for x in values for i in axes)
            shapes = [x.shape if is_static else tf.shape(x) for x in values]
            counts = [reduction.num_entries(shape, axes) for shape in shapes]
            return tensors.divide(total, sum_over_workers(sum(counts)))

    def sum_logs(self, logs: Sequence[Sequence[Any]]) -> list[Any]:
        sums = list(map(tensors.sum_values, logs))
        if self.workers is None:
            return sums
        return self.workers.sum_all("logs", sums, verify=Verify.NEVER)

    def gather(self, values: Sequence[Any], axis: int) -> Any:
        name = "strategy.gather"
        with self.collective_scope(name), tf.device(self._first_device):
            local = tensors.concat_values(values, axis)
            if self.workers is None:
                return local
            return gather_over_workers(self.workers, name, local, axis)

    def place(self, parts: Sequence[Any], alike: bool | None = None) -> PerReplica:
        values = []
        for part, device in zip(parts, self.devices, strict=True):
            with tf.device(native_name(device)):
                if not tf.is_tensor(part):
                    # A constant copies its array; a converted tensor may share it.
                    part = tf.constant(part)
                values.append(tf.identity(part))
        return PerReplica(values)


def _read(value: Any) -> Any:
    """Return the value of a variable that a replica returned."""
    is_variable = isinstance(value, keras.Variable | tf.Variable)
    if is_variable or hasattr(value, "__array__") and not tf.is_tensor(value):
        return tf.convert_to_tensor(value)
    return value


def _convert(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for AutoGraph, where its caller is converted."""
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(fn, autograph.control_status_ctx(), False)


def _call_in_thread(fn: Callable[[], Any], scope: AbstractContextManager[Any]) -> Any:
    """Call `fn` in a scope and in a thread that is in no native strategy."""
    policy = keras.config.dtype_policy()

    @tf.autograph.experimental.do_not_convert
    def call():
        keras.config.set_dtype_policy(policy)  # Keras stores it per thread
        with scope:
            return fn()

    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(call).result()
