"""Compiled `run`: one shard_map program for all replicas."""

import contextlib
import inspect
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import PartitionSpec
from keras import tree

from keras_strategy.backends.jax import patches_state as keras_state
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
    describe_arguments,
    flatten_arguments,
    is_uneven,
    repeat_first_replica,
)
from keras_strategy.backends.jax.distribution import AXIS, ReplicaDistribution
from keras_strategy.backends.jax.eager_run import EagerRunner
from keras_strategy.backends.jax.replica import JaxReplica
from keras_strategy.backends.jax.state import (
    LocalShards,
    aggregate,
    discard_note,
    donatable_arrays,
    partition_specs,
    readable_arrays,
    replica_values,
    set_program_outputs,
    set_replica_values,
    without_weak_type,
)
from keras_strategy.backends.jax.values import ShardedPerReplica
from keras_strategy.core import context
from keras_strategy.core.context import ReplicaContext
from keras_strategy.core.per_replica_attributes import discard_attribute_changes
from keras_strategy.core.step_state import RowRange, StepState
from keras_strategy.core.variable_components import unwrap_variables
from keras_strategy.keras_patches.variables_optimizers import adopt
from keras_strategy.training import ownership
from keras_strategy.training.compile_cache import CompileCache, IdentityKey
from keras_strategy.training.ownership import (
    check_sync_on_read_owner,
    strategy_of_variable,
)
from keras_strategy.training.train_step import traced_step_state
from keras_strategy.training.variable_sync import is_sync_on_read

if TYPE_CHECKING:
    from keras_strategy.cluster.membership import Cluster
    from keras_strategy.core.protocols import Strategy


try:
    _shard_map = jax.shard_map
except AttributeError:  # jax before 0.6
    from jax.experimental.shard_map import shard_map as _shard_map
# The replication check of shard_map would reject values that each replica writes, and
# change the gradient of psum.
_SHARD_MAP_PARAMETERS = inspect.signature(_shard_map).parameters
_CHECK = "check_vma" if "check_vma" in _SHARD_MAP_PARAMETERS else "check_rep"
_NUMPY_TYPES = np.ndarray | np.generic


class Compiler:
    """Compiler of programs for the replicas of one group."""

    def __init__(self, strategy: "Strategy", distribution: ReplicaDistribution):
        self._strategy = strategy
        self._distribution = distribution

    def compile(
        self, fn: Callable[..., Any], function: Function, arguments: Arguments
    ) -> Program:
        """Create a program that passes the variables recorded so far."""
        function.renew_seed()
        variables = function.variables.values()
        local = [v for v in variables if is_sync_on_read(v)]
        for variable in local:
            check_sync_on_read_owner(self._strategy, variable)
        mirrored = [v for v in variables if not is_sync_on_read(v)]
        local_owners = (None, self._strategy)
        program = Program(
            name=getattr(fn, "__name__", type(fn).__name__),
            written=[v for v in mirrored if id(v) in function.written],
            read=[v for v in mirrored if id(v) not in function.written],
            local=local,
            foreign=[
                v for v in mirrored if strategy_of_variable(v) not in local_owners
            ],
            seed=function.seed,
        )

        leaves = [x for x in tree.flatten(arguments.structure) if type(x) is Tensor]
        batch_indices = [i for i, leaf in enumerate(leaves) if leaf.is_batch]
        written_dims = list(map(self._distribution.sharded_dim, program.written))
        read_dims = list(map(self._distribution.sharded_dim, program.read))

        def body(written, local, read, tensors):
            shards = LocalShards(self._distribution.replicas)
            written = map(shards.gather, written, written_dims)
            read = map(shards.gather, read, read_dims)
            scope = RunScope(
                [
                    *zip(program.written, written, strict=True),
                    *zip(program.local, [x[0] for x in local], strict=True),
                    *zip(program.read, read, strict=True),
                ]
            )
            is_sharding = self._distribution.shard is not None
            replica = JaxReplica(
                self._strategy,
                self._distribution.topology.devices,
                shards if is_sharding else None,
            )
            if batch_indices:
                replica.step = self._batch_step_state(
                    fn, function, tensors, arguments, batch_indices
                )
            args, kwargs = arguments.restore(tensors)
            # JAX may trace again at any call, even outside of every scope.
            with (
                context.cross_replica_scope(self._strategy),
                self._distribution.scope(),
                context.replica_scope(ReplicaContext(self._strategy, replica)),
                scope,
            ):
                result = unwrap_variables(fn(*args, **kwargs))
            if function.record(scope) or not program.covers(scope):
                raise NewVariables
            outputs, totals = [], []

            def leaf(x):
                if not (keras.ops.is_tensor(x) or isinstance(x, _NUMPY_TYPES)):
                    return Constant(x)
                x = jnp.asarray(x)
                outputs.append(x[None] if x.ndim == 0 else x)
                if self._needs_total(x, replica):
                    totals.append(jax.lax.psum(x, AXIS))
                    return Tensor(split=True, scalar=True, total=len(totals) - 1)
                return Tensor(split=True, scalar=x.ndim == 0)

            structure = tree.map_structure(leaf, result)

            def new_values(variables):
                return [
                    without_weak_type(scope.state_mapping[id(v)]) for v in variables
                ]

            local = new_values(program.local)
            return (
                Outputs(IdentityKey(structure), outputs),
                totals,
                list(map(shards.shard, new_values(program.written), written_dims)),
                [x[None] for x in local],
                list(map(aggregate, program.local, local)),
            )

        split, everywhere = PartitionSpec(AXIS), PartitionSpec()
        written_specs = partition_specs(written_dims)
        tensors = [split if leaf.split else everywhere for leaf in leaves]
        shard_map: Any = _shard_map  # its parameters differ between versions
        mapped = shard_map(
            body,
            mesh=self._distribution.mesh,
            in_specs=(written_specs, split, partition_specs(read_dims), tensors),
            out_specs=(split, everywhere, written_specs, split, everywhere),
            **{_CHECK: False, **self._manual_axes()},
        )
        shardings = {}
        written = [self._distribution.sharding_of(v) for v in program.written]
        if self._distribution.has_logical_axes or any(
            sharding.mesh != self._distribution.mesh for sharding in written
        ):
            # Otherwise XLA would choose shardings for variables that logical devices
            # split, and replicate variables with fewer shards than replicas.
            split, everywhere = self._distribution.split, self._distribution.everywhere
            shardings["out_shardings"] = (split, everywhere, written, split, everywhere)
        program.call = jax.jit(mapped, donate_argnums=(0, 1), **shardings)
        return program

    def _manual_axes(self) -> dict[str, Any]:
        """Return the arguments that make only the replica axis manual."""
        if not self._distribution.has_logical_axes:
            return {}
        if "axis_names" in _SHARD_MAP_PARAMETERS:
            return {"axis_names": {AXIS}}
        return {"auto": frozenset(self._distribution.mesh.axis_names) - {AXIS}}

    def _batch_step_state(
        self,
        fn: Callable[..., Any],
        function: Function,
        tensors: Sequence[Any],
        arguments: Arguments,
        batch_indices: Sequence[int],
    ) -> StepState:
        """Return the step state of a replica that receives a dataset's rows.

        `batch_indices` are the indices of these rows in the traced `tensors`.
        """
        count = tensors[batch_indices[0]].shape[0]
        total = count * self._strategy.num_replicas_in_sync
        rows = RowRange(jax.lax.axis_index(AXIS) * count, count, total)

        def call(tensors):
            args, kwargs = arguments.restore(tensors)
            fn(*args, **kwargs)

        return traced_step_state(rows, function.draws, call, tensors, batch_indices)

    def _needs_total(self, output: Any, replica: JaxReplica) -> bool:
        """Return True if the program also returns an output's sum, for `reduce`.

        A loss is summed in the same collective as the gradients. A separate program
        would have to wait for the step.
        """
        return (
            replica.is_training
            and self._distribution.cluster is None
            and output.ndim == 0
            and jnp.issubdtype(output.dtype, jnp.inexact)
        )


# Programs of two Python threads must reach all devices in the same order. Otherwise
# each would wait for the collectives of the other.
_dispatch_lock = threading.Lock()


class ProgramCaller:
    """Caller of one group's programs.

    This is all of the Python code of a cached step, so it makes few calls: tests/speed
    counts them.
    """

    def __init__(self, distribution: ReplicaDistribution):
        self._distribution = distribution
        self._workers = distribution.workers
        self._previous: Outputs | None = None

    def call(self, program: Program, arrays: list[jax.Array]) -> Any:
        """Call a program and return the function's outputs."""
        if self._workers is None:
            with _dispatch_lock:
                outputs, totals = self._call(program, arrays)
        else:
            with (
                _dispatch_lock,
                self._workers.track_operation(f"strategy.run({program.name})"),
            ):
                # The devices run the previous call while Python prepared this one.
                jax.block_until_ready(self._previous)
                outputs, totals = self._call(program, arrays)
            self._previous = outputs
        structure, distribution = outputs.structure.it, self._distribution
        if type(structure) is Tensor:  # the usual output: a loss
            total = None if structure.total is None else totals[structure.total]
            return ShardedPerReplica(
                outputs.arrays[0], structure.scalar, distribution, total
            )
        remaining = iter(outputs.arrays)

        def leaf(x):
            if isinstance(x, Constant):
                return x.value
            total = None if x.total is None else totals[x.total]
            return ShardedPerReplica(next(remaining), x.scalar, distribution, total)

        return tree.map_structure(leaf, structure)

    def _call(self, program: Program, arrays: list[jax.Array]) -> tuple[Outputs, list]:
        """Return the outputs and the sums over replicas.

        Runs under the lock from reading the variables to writing them: otherwise
        another thread could read arrays that this program donates.
        """
        program.renew_seed()
        written, local, read = self.variable_arrays(program)
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
            set_program_outputs(program.written, values)
        else:
            keras_state.set_arrays(program.written, self._distribution.to_home(values))
        program.release_seed()
        if local:
            set_replica_values(program.local, aggregated, local)
        return outputs, totals

    def variable_arrays(self, program: Program) -> tuple[list, list, list]:
        """Return the arrays of the written, local and read variables."""
        sharding_of = self._distribution.sharding_of
        for variable in program.foreign:
            discard_note(variable)  # its array may be on other devices
        return (
            donatable_arrays(program.written, sharding_of),
            [replica_values(v, self._distribution) for v in program.local],
            readable_arrays(program.read, sharding_of),
        )


class Runner:
    """Runner of functions on the replicas of one group."""

    def __init__(self, strategy: "Strategy", distribution: ReplicaDistribution):
        self._strategy = strategy
        self._distribution = distribution
        self._workers = distribution.workers
        self._eager = EagerRunner(strategy, distribution)
        self._caller = ProgramCaller(distribution)
        self._compiler = Compiler(strategy, distribution)
        self._functions = CompileCache(Function)

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple,
        kwargs: dict,
        compiled: bool,
        scope: Callable[[], AbstractContextManager[Any]],
    ) -> Any:
        """Implement `ReplicaGroup.run`."""
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
                        return self._caller.call(program, arguments.arrays)
                    except _TRACE_ERRORS:
                        pass  # traced again after a JAX setting changed
                    except BaseException:
                        keras_state.initialize_pending()
                        raise
        with scope():
            return self._run(fn, function, args, kwargs, arguments, compiled)

    def _cached(self, function: Function, arguments: Arguments) -> Program | None:
        """Return the cached program if no communication with workers is needed."""
        if self._workers is None or arguments.is_global:
            return function.programs.get(arguments.key)
        return None

    def _run(
        self,
        fn: Callable[..., Any],
        function: Function,
        args: tuple,
        kwargs: dict,
        arguments: Arguments | None,
        compiled: bool,
    ) -> Any:
        """Compile a program and call it, or run the function eagerly.

        `arguments` is None if one program cannot serve all replicas.
        """
        if compiled and self._workers is not None:
            cluster = self._workers.cluster
            if not self._all_workers_agree(cluster, function, arguments, args, kwargs):
                arguments = None
        if arguments is None:
            self._trace_for_variables(fn, function, args, kwargs)
            result = self._eager.run(fn, args, kwargs, function.draws)
            self._functions.refresh(fn)
            return result

        def attempt():
            program = function.programs.get(arguments.key)
            if program is not None:
                try:
                    return self._caller.call(program, arguments.arrays)
                except NewVariables:
                    function.programs.pop(arguments.key, None)
                    raise
            program = self._compiler.compile(fn, function, arguments)
            result = self._caller.call(program, arguments.arrays)
            function.add_program(program, arguments.key, fn)
            self._functions.refresh(fn)
            return result

        try:
            return self._retry_for_new_variables(fn, function, attempt)
        except _CONCRETE_ERRORS as error:
            raise TypeError(_CONCRETE_MESSAGE) from error

    def _all_workers_agree(
        self,
        cluster: "Cluster",
        function: Function,
        arguments: Arguments | None,
        args: tuple,
        kwargs: dict,
    ) -> bool:
        """Return True if all workers call the same program.

        Workers compare their arguments before a program is compiled, and later unless
        each knows the others' arguments from its own. If a worker does something else
        then, the others wait in the program until the watchdog reports where each
        worker is.
        """
        if is_uneven((args, kwargs)):
            return True
        if arguments is not None and self._cached(function, arguments) is not None:
            return True
        described = describe_arguments((args, kwargs), self._distribution)
        return cluster.values_if_different("strategy.run", described) is None

    def _trace_for_variables(
        self, fn: Callable[..., Any], function: Function, args: tuple, kwargs: dict
    ) -> None:
        """Trace a function once, so that it creates its variables.

        Otherwise each replica's thread would create its own.
        """
        if function.is_traced:
            return
        args, kwargs = repeat_first_replica(
            (args, kwargs), len(self._distribution.devices)
        )

        def attempt():
            arguments = flatten_arguments(args, kwargs, self._distribution)
            with discard_attribute_changes():
                program = self._compiler.compile(fn, function, arguments)
                values = self._caller.variable_arrays(program)
                jax.eval_shape(program.call, *values, arguments.arrays)

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
                    keras_state.initialize_pending()
                    ownership.broadcast_pending_values()
                    paths = [v.path for v in function.variables.values()]
                    adopt(self._strategy, function.assigned())
        except BaseException:
            keras_state.initialize_pending()
            raise
        raise ValueError(
            f"The function {fn!r} creates new variables every time it is called, such "
            f"as '{paths[-1]}'. Create layers, metrics and variables once, outside of "
            "the function that `strategy.run` calls."
        )


_CONCRETE_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
# Errors of a trace, before its program computes anything.
_TRACE_ERRORS = (NewVariables, *_CONCRETE_ERRORS)
_CONCRETE_MESSAGE = (
    "The function passed to `strategy.run` made a Python decision on a tensor, such as "
    "`if`, `int()` or `range()` of a value or of the replica id. On JAX one compiled "
    "program serves all replicas, and tensors have no values while Python traces it. "
    "Use `keras.ops.where` or `keras.ops.cond` instead."
)
