"""How a function of one replica becomes one program for all of them."""

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import PartitionSpec
from keras import tree

from keras_strategy.backends.jax import on_read, state
from keras_strategy.backends.jax.arguments import Arguments, Constant, Tensor, bare
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
from keras_strategy.core import context
from keras_strategy.core.replica_context import ReplicaContext
from keras_strategy.core.row_range import RowRange
from keras_strategy.core.step_state import StepState
from keras_strategy.rules.aggregation import is_on_read
from keras_strategy.rules.batches import traced_step
from keras_strategy.rules.ownership import require_own_parts, strategy_of_variable
from keras_strategy.rules.reads import Identity

if TYPE_CHECKING:
    from keras_strategy.core.strategy import Strategy

try:
    _shard_map = jax.shard_map
except AttributeError:  # jax before 0.6
    from jax.experimental.shard_map import shard_map as _shard_map
# Its check that outputs are replicated would refuse what each replica writes of its
# own, and change the gradient of psum.
_PARAMETERS = inspect.signature(_shard_map).parameters
_CHECK = "check_vma" if "check_vma" in _PARAMETERS else "check_rep"


class Compiler:
    """Makes programs for the replicas of one group.

    Args:
        strategy: The strategy.
        devices: Canonical names of its devices.
        distribution: Their layouts.
    """

    def __init__(
        self,
        strategy: "Strategy",
        devices: tuple[str, ...],
        distribution: ReplicaDistribution,
    ):
        self._strategy = strategy
        self._devices = devices
        self._distribution = distribution

    def compile(
        self, fn: Callable[..., Any], function: Function, arguments: Arguments
    ) -> Program:
        """Makes a program for the variables that are known.

        Args:
            fn: The function.
            function: What is known of it.
            arguments: Those of its call, taken apart.
        """
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
        written = [self._distribution.sharding_of(v) for v in program.written]
        if self._distribution.of_replicas_alone or any(
            sharding.mesh != self._distribution.mesh for sharding in written
        ):
            # XLA would choose them for what the logical devices share, and keep whole
            # what is in fewer parts than there are replicas.
            split, everywhere = self._distribution.split, self._distribution.everywhere
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
            and self._distribution.cluster is None
            and output.ndim == 0
            and jnp.issubdtype(output.dtype, jnp.inexact)
        )


_NUMPY = np.ndarray | np.generic
