"""Compiled `run`: one shard_map program for all replicas."""

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import PartitionSpec
from keras import tree

from keras_strategy.backends.jax.arguments import (
    Arguments,
    Constant,
    Tensor,
)
from keras_strategy.backends.jax.distribution import AXIS, ReplicaDistribution
from keras_strategy.backends.jax.on_read import aggregate
from keras_strategy.backends.jax.programs import (
    Function,
    NewVariables,
    Outputs,
    Program,
    RunScope,
)
from keras_strategy.backends.jax.replica import JaxReplica
from keras_strategy.backends.jax.splitting import LocalShards, partition_specs
from keras_strategy.backends.jax.state import without_weak_type
from keras_strategy.core import context
from keras_strategy.core.components import unwrap_variables
from keras_strategy.core.replica_context import ReplicaContext
from keras_strategy.core.row_range import RowRange
from keras_strategy.core.step_state import StepState
from keras_strategy.rules.aggregation import is_sync_on_read
from keras_strategy.rules.batches import traced_step_state
from keras_strategy.rules.ownership import check_sync_on_read_owner, strategy_of_variable
from keras_strategy.rules.reads import IdentityKey

if TYPE_CHECKING:
    from keras_strategy.core.strategy import Strategy

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
        """Create a program that passes the variables recorded so far."""
        function.renew_seed()
        mirrored = [
            (key, v) for key, v in function.variables.items() if not is_sync_on_read(v)
        ]
        for variable in function.variables.values():
            if is_sync_on_read(variable):
                check_sync_on_read_owner(self._strategy, variable)
        program = Program(
            written=[v for key, v in mirrored if key in function.written],
            read=[v for key, v in mirrored if key not in function.written],
            local=[v for v in function.variables.values() if is_sync_on_read(v)],
            foreign=[
                v
                for _, v in mirrored
                if strategy_of_variable(v) not in (None, self._strategy)
            ],
            seed=function.seed,
            name=getattr(fn, "__name__", type(fn).__name__),
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
                self._strategy, self._devices, shards if is_sharding else None
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

        Args:
            fn: The function.
            function: Its recorded variables and draws.
            tensors: The traced arrays of the arguments.
            arguments: The arguments.
            batch_indices: The indices of the dataset's rows in `tensors`.
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
