"""`run`: one shard_map program for all replicas, or replicas in turns."""

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import PartitionSpec
from keras import tree

from keras_strategy.backends.jax import internals, state
from keras_strategy.backends.jax.collectives import (
    LocalBatches,
    ShardedPerReplica,
    UnevenPerReplica,
)
from keras_strategy.backends.jax.compile_cache import (
    Arguments,
    Constant,
    DifferentReplicas,
    Function,
    NewVariables,
    Outputs,
    Program,
    RunScope,
    Tensor,
    flatten_arguments,
)
from keras_strategy.backends.jax.distribution import AXIS, ReplicaDistribution
from keras_strategy.backends.jax.replica import EagerReplica, JaxReplica, ThreadScope
from keras_strategy.backends.jax.variables import discard_note
from keras_strategy.backends.jax.virtual_replicas import VirtualProgram
from keras_strategy.backends.threads.patches import (
    copy_settings,
    keep_global_seed_generator,
)
from keras_strategy.backends.threads.pool import ReplicaThreads, TurnScheduler
from keras_strategy.core import context
from keras_strategy.core.context import ReplicaContext
from keras_strategy.core.per_replica_attributes import (
    GroupAttributes,
    discard_attribute_changes,
)
from keras_strategy.core.protocols import Strategy
from keras_strategy.core.step_state import RowRange, StepState, row_ranges
from keras_strategy.core.variable_components import unwrap_variables
from keras_strategy.keras_patches.internals import stored_dtype, stored_value
from keras_strategy.keras_patches.variables_optimizers import adopt
from keras_strategy.training import ownership
from keras_strategy.training.compile_cache import CompileCache, IdentityKey
from keras_strategy.training.ownership import strategy_of_variable
from keras_strategy.training.random import BatchDimCache
from keras_strategy.training.train_step import (
    find_batch_rows,
    traced_run_state,
    traced_step_state,
)
from keras_strategy.training.variable_sync import average_statistics, is_sync_on_read
from keras_strategy.values import DistributedValues, PerReplica, regroup

_CONCRETE_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
# Errors of a trace, before its program computes anything.
_TRACE_ERRORS = (NewVariables, *_CONCRETE_ERRORS)
# Programs of two Python threads must reach all devices in the same order. Otherwise
# each would wait for the collectives of the other.
_dispatch_lock = threading.Lock()


def compile_program(
    strategy: Strategy,
    distribution: ReplicaDistribution,
    fn: Callable[..., Any],
    function: Function,
    arguments: Arguments,
) -> Program:
    """Create a program that passes the variables recorded so far."""
    function.renew_seed()
    variables = function.variables.values()
    local = [v for v in variables if is_sync_on_read(v)]
    for variable in local:
        ownership.check_owner(strategy, variable)
    mirrored = [v for v in variables if not is_sync_on_read(v)]
    written = [v for v in mirrored if id(v) in function.written]
    read = [v for v in mirrored if id(v) not in function.written]
    written_dims = list(map(distribution.sharded_dim, written))
    read_dims = list(map(distribution.sharded_dim, read))
    leaves = [x for x in tree.flatten(arguments.structure) if type(x) is Tensor]
    batch_indices = [i for i, leaf in enumerate(leaves) if leaf.is_batch]

    def body(written_values, local_values, read_values, tensors):
        shards = state.LocalShards(distribution)
        written_values = map(shards.gather, written_values, written_dims)
        read_values = map(shards.gather, read_values, read_dims)
        scope = RunScope(
            [
                *zip(written, written_values, strict=True),
                *zip(local, [x[0] for x in local_values], strict=True),
                *zip(read, read_values, strict=True),
            ]
        )
        replica = JaxReplica(
            strategy,
            distribution.topology.devices,
            None if distribution.shard is None else shards,
        )
        if batch_indices:

            def call(tensors):
                args, kwargs = arguments.restore(tensors)
                fn(*args, **kwargs)

            count = tensors[batch_indices[0]].shape[0]
            total = count * strategy.num_replicas_in_sync
            replica.step = traced_step_state(
                RowRange(replica.id * count, count, total),
                function.draws,
                call,
                tensors,
                batch_indices,
            )
        args, kwargs = arguments.restore(tensors)
        # JAX may trace again at any call, even outside of every scope.
        with (
            context.cross_replica_scope(strategy),
            distribution.scope(),
            context.replica_scope(ReplicaContext(strategy, replica)),
            scope,
        ):
            result = unwrap_variables(fn(*args, **kwargs))
            average_statistics(replica)
        assignable = {id(v) for v in (*written, *local)}
        readable = {id(v) for v in read} | assignable
        is_new = scope.written.keys() - assignable or scope.used.keys() - readable
        if function.record(scope) or is_new:
            raise NewVariables
        # A loss is summed for `reduce` in the same collective as the gradients. A
        # separate program would have to wait for the step.
        sums_losses = replica.is_training and distribution.cluster is None
        outputs, totals = [], []

        def leaf(x):
            if not (keras.ops.is_tensor(x) or isinstance(x, np.ndarray | np.generic)):
                return Constant(x)
            x = jnp.asarray(x)
            outputs.append(x[None] if x.ndim == 0 else x)
            if sums_losses and x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.inexact):
                totals.append(jax.lax.psum(x, AXIS))
                return Tensor(split=True, scalar=True, total=len(totals) - 1)
            return Tensor(split=True, scalar=x.ndim == 0)

        structure = tree.map_structure(leaf, result)

        def new_values(variables):
            return [
                state.without_weak_type(scope.state_mapping[id(v)]) for v in variables
            ]

        local_values = new_values(local)
        return (
            Outputs(IdentityKey(structure), outputs),
            totals,
            list(map(shards.shard, new_values(written), written_dims)),
            [x[None] for x in local_values],
            list(map(state.aggregate, local, local_values)),
        )

    owners = (None, strategy)
    create = functools.partial(
        Program,
        name=getattr(fn, "__name__", type(fn).__name__),
        written=written,
        read=read,
        local=local,
        foreign=[v for v in mirrored if strategy_of_variable(v) not in owners],
        seed_index=next((i for i, v in enumerate(written) if v is function.seed), None),
    )
    if distribution.per_device is not None:
        splits = (False, True, False, [leaf.split for leaf in leaves])
        is_uneven = any(isinstance(array, LocalBatches) for array in arguments.arrays)
        out_splits = (None if is_uneven else True, False, False, True, False)
        return create(
            call=VirtualProgram(body, splits, out_splits, distribution, written)
        )
    split, everywhere = PartitionSpec(AXIS), PartitionSpec()
    written_specs = state.partition_specs(written_dims)
    tensors = [split if leaf.split else everywhere for leaf in leaves]
    mapped = jax.shard_map(
        body,
        mesh=distribution.mesh,
        in_specs=(written_specs, split, state.partition_specs(read_dims), tensors),
        out_specs=(split, everywhere, written_specs, split, everywhere),
        axis_names={AXIS},
        # It would reject values that each replica writes, and change psum's gradient.
        check_vma=False,
    )
    options = {}
    shardings = list(map(distribution.sharding_of, written))
    if distribution.has_logical_axes or any(
        sharding.mesh != distribution.mesh for sharding in shardings
    ):
        # Otherwise XLA would choose shardings for variables that logical devices
        # split, and replicate variables with fewer shards than replicas.
        split, everywhere = distribution.split, distribution.everywhere
        options["out_shardings"] = (split, everywhere, shardings, split, everywhere)
    return create(call=jax.jit(mapped, donate_argnums=(0, 1), **options))


class EagerRunner:
    def __init__(self, strategy: Strategy, distribution: ReplicaDistribution):
        self._strategy = strategy
        self._distribution = distribution
        devices = distribution.topology.devices
        self._threads = ReplicaThreads(devices)
        self._attributes = GroupAttributes(strategy, len(devices), keras.ops.is_tensor)
        self._lock = threading.Lock()

    def run(
        self, fn: Callable[..., Any], args: tuple, kwargs: dict, draws: BatchDimCache
    ) -> Any:
        """Implement `ReplicaGroup.run`; `draws` are the function's random draws."""
        distribution = self._distribution
        with self._lock:  # one run at a time
            turns = TurnScheduler(len(distribution.devices))
            attributes = self._attributes.begin()
            values: dict[int, tuple] = {}
            replicas = [
                EagerReplica(self._strategy, i, distribution, turns, changes, values)
                for i, changes in enumerate(attributes)
            ]
            batch = find_batch_rows(args, kwargs)
            if batch is not None and batch.counts is not None:
                rows = row_ranges(batch.counts)[batch.first :]
                for i, replica in enumerate(replicas):
                    replica.step = traced_run_state(
                        fn, (args, kwargs), rows[i], i, draws
                    )
            settings = copy_settings()
            try:
                outputs = self._threads.call(
                    turns,
                    [
                        functools.partial(replica.call, fn, args, kwargs, settings)
                        for replica in replicas
                    ],
                )
            finally:
                for replica in replicas:  # free the state despite reference cycles
                    replica.step = StepState()
            self._commit([replica.scope for replica in replicas])
            self._attributes.commit(attributes)
            keep_global_seed_generator(turns.seed_generator)
        has_workers = distribution.workers is not None
        return regroup(outputs, keras.ops.is_tensor, always_distributed=has_workers)

    def _commit(self, scopes: Sequence[ThreadScope]) -> None:
        """Write the replicas' assignments after all of them have succeeded."""
        written: dict[int, Any] = {}
        for scope in scopes:
            written.update(scope.written)
        adopt(
            self._strategy,
            [v for v in written.values() if not internals.is_global_seed(v)],
        )
        for variable in written.values():
            if internals.is_global_seed(variable):
                internals.release(variable, scopes[0].get_current_value(variable))
                continue
            dtype = stored_dtype(variable)
            values = [
                jnp.asarray(scope.get_current_value(variable), dtype)
                for scope in scopes
            ]
            state.set_components(variable, values, self._distribution)


class Runner:
    # `run` and `_call` are all of the Python code of a cached step, so they make few
    # calls: tests/speed counts them.

    def __init__(self, strategy: Strategy, distribution: ReplicaDistribution):
        self._strategy = strategy
        self._distribution = distribution
        self._workers = distribution.workers
        self._compile = functools.partial(compile_program, strategy, distribution)
        self._eager = EagerRunner(strategy, distribution)
        self._functions = CompileCache(Function)
        self._previous: Outputs | None = None

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple,
        kwargs: dict,
        compiled: bool,
        scope: Callable[[], AbstractContextManager[Any]],
    ) -> Any:
        function = self._functions.get(fn, compiled)
        arguments = None
        if compiled:
            try:
                arguments = flatten_arguments(args, kwargs, self._distribution)
            except DifferentReplicas:
                pass
            else:
                program = self._cached(function, arguments)
                if program is not None:
                    try:
                        return self._call(program, arguments.arrays)
                    except _TRACE_ERRORS:
                        pass  # traced again after a JAX setting changed
                    except BaseException:
                        internals.initialize_pending()
                        raise
        with scope():
            if compiled and not self._all_workers_agree(
                function, arguments, (args, kwargs)
            ):
                arguments = None
            if arguments is not None and arguments.key in function.without_program:
                arguments = None
            if arguments is None:  # one program cannot serve all replicas
                self._trace_for_variables(fn, function, (args, kwargs))
                result = self._eager.run(fn, args, kwargs, function.draws)
            else:
                try:
                    result = self._compile_and_call(fn, function, arguments)
                except DifferentReplicas:
                    function.without_program.add(arguments.key)
                    result = self._eager.run(fn, args, kwargs, function.draws)
            self._functions.refresh(fn)
            return result

    def _cached(self, function: Function, arguments: Arguments) -> Program | None:
        """Return the cached program if no communication with workers is needed."""
        if self._workers is None or arguments.is_global:
            return function.programs.get(arguments.key)
        return None

    def _all_workers_agree(
        self, function: Function, arguments: Arguments | None, inputs: Any
    ) -> bool:
        """Return True if all workers call the same program."""
        # They compare their arguments before a program is compiled, and later only
        # those that are not `is_global`. If a worker does something else then, the
        # others wait in the program until the watchdog reports where each worker is.
        if self._workers is None or any(
            isinstance(x, UnevenPerReplica) for x in tree.flatten(inputs)
        ):
            return True
        if arguments is not None and self._cached(function, arguments) is not None:
            return True
        described = None if arguments is None else arguments.describe()
        cluster = self._workers.cluster
        return cluster.values_if_different("strategy.run", described) is None

    def _compile_and_call(
        self, fn: Callable[..., Any], function: Function, arguments: Arguments
    ) -> Any:
        def attempt():
            program = function.programs.get(arguments.key)
            if program is not None:
                try:
                    return self._call(program, arguments.arrays)
                except NewVariables:
                    function.programs.pop(arguments.key, None)
                    raise
            program = self._compile(fn, function, arguments)
            result = self._call(program, arguments.arrays)
            function.add_program(program, arguments.key, fn)
            return result

        try:
            return self._retry_for_new_variables(fn, function, attempt)
        except _CONCRETE_ERRORS as error:
            raise TypeError(
                "The function passed to `strategy.run` made a Python decision on a "
                "tensor, such as `if`, `float()` or `range()` of a value or of the "
                "replica id. On JAX one compiled program serves all replicas, and "
                "tensors have no values while Python traces it. Use `keras.ops.where` "
                "or `keras.ops.cond` instead."
            ) from error

    def _trace_for_variables(
        self, fn: Callable[..., Any], function: Function, inputs: Any
    ) -> None:
        """Trace a function once, or each replica's thread would create variables."""
        if function.is_traced:
            return

        def first_only(x):
            if not isinstance(x, DistributedValues):
                return x
            return PerReplica([x.values[0]] * len(self._distribution.devices))

        args, kwargs = tree.map_structure(first_only, inputs)

        def attempt():
            arguments = flatten_arguments(args, kwargs, self._distribution)
            with discard_attribute_changes():
                program = self._compile(fn, function, arguments)
                values = self._variable_arrays(program)
                program.call.trace(*values, arguments.arrays)

        # The eager run raises the function's errors.
        with contextlib.suppress(Exception):
            self._retry_for_new_variables(fn, function, attempt)
        function.is_traced = True

    def _retry_for_new_variables(
        self, fn: Callable[..., Any], function: Function, attempt: Callable[[], Any]
    ) -> Any:
        """Trace until the program passes all variables that the trace uses."""
        paths = [""]
        try:
            for _ in range(4):
                try:
                    result = attempt()
                    function.is_traced = True
                    if any(variable.trainable for variable in function.assigned()):
                        self._distribution.on_training()
                    return result
                except NewVariables:
                    # Initialize the variables that the trace created.
                    internals.initialize_pending()
                    ownership.broadcast_pending_values()
                    paths = [v.path for v in function.variables.values()]
                    adopt(self._strategy, function.assigned())
        except BaseException:
            internals.initialize_pending()
            raise
        raise ValueError(
            f"The function {fn!r} creates new variables every time it is called, such "
            f"as '{paths[-1]}'. Create layers, metrics and variables once, outside of "
            "the function that `strategy.run` calls."
        )

    def _call(self, program: Program, arrays: list[jax.Array]) -> Any:
        distribution = self._distribution
        if self._workers is None:
            with _dispatch_lock:
                outputs, totals = self._dispatch(program, arrays)
        else:
            with (
                _dispatch_lock,
                self._workers.track_operation(f"strategy.run({program.name})"),
            ):
                # The devices run the previous call while Python prepared this one.
                jax.block_until_ready(self._previous)
                outputs, totals = self._dispatch(program, arrays)
            self._previous = outputs
        structure = outputs.structure.it

        # The usual output, a loss, without a call for each leaf.
        if type(structure) is Tensor and distribution.per_device is None:
            total = None if structure.total is None else totals[structure.total]
            return ShardedPerReplica(
                outputs.arrays[0], structure.scalar, distribution, total
            )
        remaining = iter(outputs.arrays)

        def leaf(x):
            if isinstance(x, Constant):
                return x.value
            array = next(remaining)
            if isinstance(array, PerReplica):  # of virtual replicas
                parts = array.values
                return PerReplica([p[0] for p in parts]) if x.scalar else array
            total = None if x.total is None else totals[x.total]
            return ShardedPerReplica(array, x.scalar, distribution, total)

        return tree.map_structure(leaf, structure)

    def _dispatch(
        self, program: Program, arrays: list[jax.Array]
    ) -> tuple[Outputs, list[jax.Array]]:
        """Return the outputs and the sums over replicas."""
        # Under the lock from reading the variables to writing them: otherwise another
        # thread could read arrays that this program donates.
        seed = program.seed_index
        if seed is not None and not internals.is_global_seed(program.written[seed]):
            # `keras.utils.set_random_seed` has replaced it.
            program.written[seed] = internals.ensure_global_seed()
        written, local, read = self._variable_arrays(program)
        try:
            outputs, totals, values, local, aggregated = program.call(
                written, local, read, arrays
            )
            if self._distribution.synchronous:
                jax.block_until_ready((outputs, values, local, aggregated))
        except Exception as error:
            if any(array.is_deleted() for array in (*written, *local)):
                error.add_note(
                    "keras_strategy: the step had started, and the values of the "
                    "variables that it assigns are lost. Load them from a checkpoint "
                    "to continue."
                )
            raise
        if self._distribution.home is None:
            state.set_program_outputs(program.written, values)
        else:
            internals.set_arrays(program.written, self._distribution.to_home(values))
        if seed is not None:  # other strategies use it on their devices
            variable = program.written[seed]
            internals.release(variable, stored_value(variable))
        if local:
            state.set_replica_values(program.local, aggregated, local)
        return outputs, totals

    def _variable_arrays(self, program: Program) -> tuple[list, list, list]:
        """Return the arrays of the written, local and read variables."""
        distribution = self._distribution
        for variable in program.foreign:
            discard_note(variable)  # its array may be on other devices
        return (
            state.donatable_arrays(program.written, distribution),
            [state.replica_values(v, distribution) for v in program.local],
            state.readable_arrays(program.read, distribution),
        )
