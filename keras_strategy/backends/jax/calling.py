"""Calls of compiled programs with the variables' values."""

import threading
from typing import Any

import jax
from keras import tree

from keras_strategy.backends.jax import hooks_state as keras_state
from keras_strategy.backends.jax.arguments import Constant, Tensor
from keras_strategy.backends.jax.distribution import ReplicaDistribution
from keras_strategy.backends.jax.marks import discard_note
from keras_strategy.backends.jax.on_read import replica_values, set_replica_values
from keras_strategy.backends.jax.programs import Outputs, Program
from keras_strategy.backends.jax.sharded import ShardedPerReplica
from keras_strategy.backends.jax.state import (
    donatable_arrays,
    readable_arrays,
    set_program_outputs,
)
from keras_strategy.backends.jax.workers import JaxWorkers

# Programs of two Python threads must reach all devices in the same order. Otherwise
# each would wait for the collectives of the other.
_dispatch_lock = threading.Lock()


class ProgramCaller:
    """Caller of one group's programs.

    This is all of the Python code of a cached step, so it makes few calls: tests/speed
    counts them.
    """

    def __init__(self, distribution: ReplicaDistribution, workers: JaxWorkers | None):
        self._distribution = distribution
        self._workers = workers
        self._previous: Outputs | None = None

    def call(self, program: Program, arrays: list[jax.Array]) -> Any:
        """Call a program and return the function's outputs."""
        if self._workers is None:
            with _dispatch_lock:
                outputs, totals = self._call(program, arrays)
        else:
            with _dispatch_lock, self._workers.track_operation(f"strategy.run({program.name})"):
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
