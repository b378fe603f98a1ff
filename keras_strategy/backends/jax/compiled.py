"""`run`: a function of one replica, compiled into one program for all of them.

Keras variables are state, and a program of JAX has none: it gets the variables' values
and returns their new ones. Which variables those are is found out by tracing: the
first trace of a function meets variables that the program does not thread yet, is
thrown away, and the second trace threads them.
"""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import PartitionSpec
from keras import tree

from keras_strategy.backends.jax import hooks_state as keras_state
from keras_strategy.backends.jax import on_read, state
from keras_strategy.backends.jax.arguments import (
    Arguments,
    Constant,
    NotOneProgram,
    Tensor,
    bare,
    described,
    is_uneven,
    of_first_replica,
    take_apart,
)
from keras_strategy.backends.jax.calling import Caller
from keras_strategy.backends.jax.distribution import AXIS, ReplicaDistribution
from keras_strategy.backends.jax.programs import (
    Function,
    NewVariables,
    Outputs,
    Program,
    RunScope,
)
from keras_strategy.backends.jax.replica import JaxReplica
from keras_strategy.backends.jax.splitting import Parts, specs
from keras_strategy.backends.jax.threaded import ThreadedRunner
from keras_strategy.backends.jax.workers import JaxWorkers
from keras_strategy.core import context
from keras_strategy.core.own_attributes import set_for_nobody
from keras_strategy.core.replica_context import ReplicaContext
from keras_strategy.core.row_range import RowRange
from keras_strategy.core.step_state import StepState
from keras_strategy.hooks.adoption import adopt
from keras_strategy.rules import first_values
from keras_strategy.rules.aggregation import is_on_read
from keras_strategy.rules.batches import traced_step
from keras_strategy.rules.known_functions import KnownFunctions
from keras_strategy.rules.ownership import require_own_parts, strategy_of_variable
from keras_strategy.rules.reads import Identity

if TYPE_CHECKING:
    from keras_strategy.core.strategy import Strategy
    from keras_strategy.workers.cluster import Cluster

try:
    _shard_map = jax.shard_map
except AttributeError:  # jax before 0.6
    from jax.experimental.shard_map import shard_map as _shard_map
# Its check that outputs are replicated would refuse what each replica writes of its
# own, and change the gradient of psum.
_PARAMETERS = inspect.signature(_shard_map).parameters
_CHECK = "check_vma" if "check_vma" in _PARAMETERS else "check_rep"


class Runner:
    """Compiles and calls functions for the replicas of one group.

    Args:
        strategy: The strategy.
        devices: Canonical names of its devices.
        distribution: Their layouts.
        workers: The processes that they belong to, or None for this one alone.
    """

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
        self._replicas = len(devices)
        self._workers = workers
        self._threaded = ThreadedRunner(strategy, devices, distribution, workers)
        self._caller = Caller(distribution, workers)
        self._functions = KnownFunctions(Function)

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple,
        kwargs: dict,
        compiled: bool,
        scope: Callable[[], AbstractContextManager[Any]],
    ) -> Any:
        """See `ReplicaGroup.run`."""
        function = self._functions.find(fn, compiled)
        arguments = None
        if compiled:
            try:
                arguments = take_apart(args, kwargs, self._distribution)
            except NotOneProgram:
                pass
            else:
                program = self._known(function, arguments)
                if program is not None:
                    try:
                        return self._caller.call(program, arguments.arrays)
                    except _TRACED_AGAIN:
                        pass  # since a setting of JAX changed; nothing was computed
                    except BaseException:
                        keras_state.initialize_pending()
                        raise
        with scope():
            return self._run(fn, function, (args, kwargs), arguments, compiled)

    def _known(self, function: Function, arguments: Arguments) -> Program | None:
        """The program for arguments, if it is there and needs no word with others."""
        if self._workers is None or arguments.of_all:
            return function.programs.get(arguments.key)
        return None

    def _run(
        self,
        fn: Callable[..., Any],
        function: Function,
        given: tuple[tuple, dict],
        arguments: Arguments | None,
        compiled: bool,
    ) -> Any:
        """Makes the program first, or does without one.

        Args:
            fn: The function.
            function: What is known of it.
            given: Its arguments.
            arguments: Them, taken apart; None where one program does not serve all
                replicas.
            compiled: Whether it is to be compiled.
        """
        args, kwargs = given
        if compiled and self._workers is not None:
            cluster = self._workers.cluster
            if not self._is_for_all(cluster, function, arguments, given):
                arguments = None
        if arguments is None:
            self._learn(fn, function, of_first_replica(given, self._replicas))
            result = self._threaded.run(fn, args, kwargs, function.draws)
            self._functions.called(fn)
            return result

        def attempt():
            program = function.programs.get(arguments.key)
            if program is not None:
                try:
                    return self._caller.call(program, arguments.arrays)
                except NewVariables:
                    function.programs.pop(arguments.key, None)
                    raise
            program = self._compile(fn, function, arguments)
            result = self._caller.call(program, arguments.arrays)
            function.keep(program, arguments.key, fn)
            self._functions.called(fn)
            return result

        try:
            return self._until_known(fn, function, attempt)
        except _CONCRETE_ERRORS as error:
            raise TypeError(_CONCRETE) from error

    def _is_for_all(
        self,
        cluster: "Cluster",
        function: Function,
        arguments: Arguments | None,
        given: Any,
    ) -> bool:
        """Whether all workers call one program, which needs every one of them.

        They ask each other before a program is compiled. They need not ask again
        where each can tell from its own arguments what those of the others are. A
        worker that does something else nevertheless leaves the others waiting in the
        program, where the watchdog finds them, and tells who is where.
        """
        if is_uneven(given):
            return True
        if arguments is not None and self._known(function, arguments) is not None:
            return True
        mine = described(given, self._distribution)
        return cluster.differences("strategy.run", mine) is None

    def _learn(self, fn: Callable[..., Any], function: Function, first: Any) -> None:
        """Traces a function for the variables that it makes.

        Replicas in threads would each make their own.

        Args:
            fn: The function.
            function: What is known of it.
            first: Its arguments, the first replica's for all.
        """
        if function.known:
            return

        def attempt():
            args, kwargs = first
            arguments = take_apart(args, kwargs, self._distribution)
            with set_for_nobody():
                program = self._compile(fn, function, arguments)
                values = self._caller.state(program)
                jax.eval_shape(program.call, *values, arguments.arrays)

        # Whatever is wrong with the function, its run will tell.
        with contextlib.suppress(Exception):
            self._until_known(fn, function, attempt)
        function.known = True

    def _until_known(
        self, fn: Callable[..., Any], function: Function, attempt: Callable[[], Any]
    ) -> Any:
        """Traces until the program threads all variables that it meets."""
        made = [""]
        try:
            for _ in range(4):
                try:
                    result = attempt()
                    function.known = True
                    if any(variable.trainable for variable in function.assigned()):
                        self._distribution.training()
                    return result
                except NewVariables:
                    # Those that the trace made are initialised out here.
                    keras_state.initialize_pending()
                    first_values.settle()
                    made = [v.path for v in function.variables.values()]
                    adopt(self._strategy, function.assigned())
        except BaseException:
            keras_state.initialize_pending()
            raise
        raise ValueError(
            f"The function {fn!r} makes new variables every time it is called, such as "
            f"'{made[-1]}'. Make layers, metrics and variables once, outside of the "
            "function that `strategy.run` calls."
        )

    def _compile(
        self, fn: Callable[..., Any], function: Function, arguments: Arguments
    ) -> Program:
        """Makes the program for the variables that are known; see the module."""
        function.renew_seed()
        mirrored = [
            (key, v) for key, v in function.variables.items() if not is_on_read(v)
        ]
        for variable in function.variables.values():
            if is_on_read(variable):
                require_own_parts(self._strategy, variable)
        program = Program(
            written=[v for key, v in mirrored if key in function.written],
            read=[v for key, v in mirrored if key not in function.written],
            local=[v for v in function.variables.values() if is_on_read(v)],
            others=[
                v
                for _, v in mirrored
                if strategy_of_variable(v) not in (None, self._strategy)
            ],
            seed=function.seed,
            name=getattr(fn, "__name__", type(fn).__name__),
        )

        leaves = [x for x in tree.flatten(arguments.structure) if type(x) is Tensor]
        places = [place for place, leaf in enumerate(leaves) if leaf.of_batch]
        dimension_of = self._distribution.dimension_of
        written_along = [dimension_of(variable) for variable in program.written]
        read_along = [dimension_of(variable) for variable in program.read]

        def body(written, local, read, tensors):
            parts = Parts(self._distribution.replicas)
            whole = map(parts.whole, written, written_along)
            whole_read = map(parts.whole, read, read_along)
            scope = RunScope(
                [
                    *zip(program.written, whole, strict=True),
                    *zip(program.local, [x[0] for x in local], strict=True),
                    *zip(program.read, whole_read, strict=True),
                ]
            )
            share = parts if self._distribution.shard is not None else None
            replica = JaxReplica(self._strategy, self._devices, share)
            if places:
                replica.step = self._step_of_rows(
                    fn, function, tensors, arguments, places
                )
            place = ReplicaContext(self._strategy, replica)
            args, kwargs = arguments.restore(tensors)
            # JAX may trace again at any call, which may be outside of every scope.
            with (
                context.strategy_in_charge(self._strategy),
                self._distribution.scope(),
                context.replica_in_charge(place),
                scope,
            ):
                result = tree.map_structure(bare, fn(*args, **kwargs))
            if function.learn(scope) or not program.threads(scope):
                raise NewVariables
            outputs, totals = [], []

            def leaf(x):
                if not (keras.ops.is_tensor(x) or isinstance(x, _NUMPY)):
                    return Constant(x)
                x = jnp.asarray(x)
                outputs.append(x[None] if x.ndim == 0 else x)
                if self._adds_up(x, replica):
                    totals.append(jax.lax.psum(x, AXIS))
                    return Tensor(split=True, scalar=True, total=len(totals) - 1)
                return Tensor(split=True, scalar=x.ndim == 0)

            structure = tree.map_structure(leaf, result)
            local = [state.strong(scope.state_mapping[id(v)]) for v in program.local]
            after = [state.strong(scope.state_mapping[id(v)]) for v in program.written]
            return (
                Outputs(Identity(structure), outputs),
                totals,
                list(map(parts.own, after, written_along)),
                [x[None] for x in local],
                [
                    on_read.aggregate(v, x)
                    for v, x in zip(program.local, local, strict=True)
                ],
            )

        split, everywhere = PartitionSpec(AXIS), PartitionSpec()
        tensors = [split if leaf.split else everywhere for leaf in leaves]
        shard_map: Any = _shard_map  # whose parameters differ between versions
        mapped = shard_map(
            body,
            mesh=self._distribution.mesh,
            in_specs=(specs(written_along), split, specs(read_along), tensors),
            out_specs=(split, everywhere, specs(written_along), split, everywhere),
            **{_CHECK: False, **self._manual()},
        )
        layouts = {}
        if self._distribution.of_replicas_alone:
            # XLA would choose them for what the logical devices share.
            split, everywhere = self._distribution.split, self._distribution.everywhere
            written = [self._distribution.sharding_of(v) for v in program.written]
            layouts["out_shardings"] = (split, everywhere, written, split, everywhere)
        program.call = jax.jit(mapped, donate_argnums=(0, 1), **layouts)
        return program

    def _manual(self) -> dict[str, Any]:
        """What says that a program is written for the replicas' axis alone."""
        if not self._distribution.of_replicas_alone:
            return {}
        if "axis_names" in _PARAMETERS:
            return {"axis_names": {AXIS}}
        return {"auto": frozenset(self._distribution.mesh.axis_names) - {AXIS}}

    def _step_of_rows(
        self,
        fn: Callable[..., Any],
        function: Function,
        tensors: Sequence[Any],
        arguments: Arguments,
        places: Sequence[int],
    ) -> StepState:
        """What is true of a replica that is given rows of a distributed dataset.

        Args:
            fn: The function.
            function: What is known of it.
            tensors: What the program got for the arrays of the arguments.
            arguments: The arguments, taken apart.
            places: Those of the rows among the tensors.
        """
        count = tensors[places[0]].shape[0]
        total = count * self._strategy.num_replicas_in_sync
        rows = RowRange(jax.lax.axis_index(AXIS) * count, count, total)

        def call(tensors):
            args, kwargs = arguments.restore(tensors)
            fn(*args, **kwargs)

        return traced_step(rows, function.draws, call, tensors, places)

    def _adds_up(self, output: Any, replica: JaxReplica) -> bool:
        """Whether an output is summed over the replicas in case `reduce` is asked to.

        A loss travels with the gradients, in the same collective, and for a program of
        its own it would have to wait.
        """
        return (
            replica.trains
            and self._workers is None
            and output.ndim == 0
            and jnp.issubdtype(output.dtype, jnp.inexact)
        )


_NUMPY = np.ndarray | np.generic
_CONCRETE_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
# What a trace raises before its program computes anything.
_TRACED_AGAIN = (NewVariables, *_CONCRETE_ERRORS)
_CONCRETE = (
    "The function given to `strategy.run` made a Python decision on a tensor, such as "
    "`if`, `int()` or `range()` of a value or of the replica id. On JAX one compiled "
    "program serves all replicas, and it has no values yet while Python runs. Use "
    "`keras.ops.where` or `keras.ops.cond` instead."
)
