"""Compilation and calls of the functions of `run`."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax

from keras_strategy.backends.jax import hooks_state as keras_state
from keras_strategy.backends.jax.arguments import (
    Arguments,
    DifferentReplicas,
    describe_arguments,
    flatten_arguments,
    is_uneven,
    repeat_first_replica,
)
from keras_strategy.backends.jax.calling import ProgramCaller
from keras_strategy.backends.jax.compiling import Compiler
from keras_strategy.backends.jax.distribution import ReplicaDistribution
from keras_strategy.backends.jax.programs import (
    Function,
    NewVariables,
    Program,
)
from keras_strategy.backends.jax.threaded import EagerRunner
from keras_strategy.backends.jax.workers import JaxWorkers
from keras_strategy.core.own_attributes import discard_attribute_changes
from keras_strategy.hooks.adoption import adopt
from keras_strategy.rules import first_values
from keras_strategy.rules.known_functions import CompileCache

if TYPE_CHECKING:
    from keras_strategy.core.strategy import Strategy
    from keras_strategy.workers.cluster import Cluster


class Runner:
    """Runner of functions on the replicas of one group."""

    def __init__(
        self,
        strategy: "Strategy",
        devices: tuple[str, ...],
        distribution: ReplicaDistribution,
        workers: JaxWorkers | None,
    ):
        self._strategy = strategy
        self._distribution = distribution
        self._replicas = len(devices)
        self._workers = workers
        self._eager = EagerRunner(strategy, devices, distribution, workers)
        self._caller = ProgramCaller(distribution, workers)
        self._compiler = Compiler(strategy, devices, distribution)
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
        args, kwargs = repeat_first_replica((args, kwargs), self._replicas)

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
                    first_values.broadcast_pending_values()
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
