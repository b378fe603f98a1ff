"""`run`: a function of one replica, compiled into one program for all of them.

Keras variables are state, and a program of JAX has none: it gets the variables' values
and returns their new ones. Which variables those are is found out by tracing: the
first trace of a function meets variables that the program does not thread yet, is
thrown away, and the second trace threads them.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax

from keras_strategy.backends.jax import hooks_state as keras_state
from keras_strategy.backends.jax.arguments import (
    Arguments,
    NotOneProgram,
    described,
    is_uneven,
    of_first_replica,
    take_apart,
)
from keras_strategy.backends.jax.calling import Caller
from keras_strategy.backends.jax.compiling import Compiler
from keras_strategy.backends.jax.distribution import ReplicaDistribution
from keras_strategy.backends.jax.programs import (
    Function,
    NewVariables,
    Program,
)
from keras_strategy.backends.jax.threaded import ThreadedRunner
from keras_strategy.backends.jax.workers import JaxWorkers
from keras_strategy.core.own_attributes import set_for_nobody
from keras_strategy.hooks.adoption import adopt
from keras_strategy.rules import first_values
from keras_strategy.rules.known_functions import KnownFunctions

if TYPE_CHECKING:
    from keras_strategy.core.strategy import Strategy
    from keras_strategy.workers.cluster import Cluster


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
        self._distribution = distribution
        self._replicas = len(devices)
        self._workers = workers
        self._threaded = ThreadedRunner(strategy, devices, distribution, workers)
        self._caller = Caller(distribution, workers)
        self._compiler = Compiler(strategy, devices, distribution)
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
            program = self._compiler.compile(fn, function, arguments)
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
                program = self._compiler.compile(fn, function, arguments)
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
