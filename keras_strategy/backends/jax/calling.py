"""Calls compiled programs with the variables' values, and writes what they assign.

This is all of our Python in a step of `run` whose program is known, so it is written to
call little: tests/speed counts the calls.
"""

import threading
from typing import Any

import jax
from keras import tree

from keras_strategy.backends.jax import hooks_state as keras_state
from keras_strategy.backends.jax import marks, on_read, state
from keras_strategy.backends.jax.arguments import Constant, Tensor
from keras_strategy.backends.jax.distribution import ReplicaDistribution
from keras_strategy.backends.jax.programs import Outputs, Program
from keras_strategy.backends.jax.sharded import ShardedPerReplica
from keras_strategy.backends.jax.workers import JaxWorkers

# Programs of two Python threads must reach all their devices in the same order: each
# would wait for the other's collectives else.
_dispatch = threading.Lock()


class Caller:
    """Calls the programs of one group.

    Args:
        distribution: The group's layouts.
        workers: The processes that it belongs to, or None for this one alone.
    """

    def __init__(self, distribution: ReplicaDistribution, workers: JaxWorkers | None):
        self._distribution = distribution
        self._workers = workers
        self._previous: Outputs | None = None

    def call(self, program: Program, arrays: list[jax.Array]) -> Any:
        """What the function returns that a program was compiled of.

        Args:
            program: The program.
            arrays: Its arguments.
        """
        if self._workers is None:
            with _dispatch:
                outputs, totals = self._call(program, arrays)
        else:
            with _dispatch, self._workers.waiting(f"strategy.run({program.name})"):
                # The devices work on the call before while Python prepares this one.
                jax.block_until_ready(self._previous)
                outputs, totals = self._call(program, arrays)
            self._previous = outputs
        structure, distribution = outputs.structure.it, self._distribution
        if type(structure) is Tensor:  # mostly: a loss
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
        """The outputs, and the sums over the replicas.

        From the reading of the state to its writing nothing comes between: one of two
        threads would be given arrays that the program of the other overwrites.
        """
        program.renew_seed()
        written, local, read = self.state(program)
        try:
            outputs, totals, values, local, aggregated = program.call(
                written, local, read, arrays
            )
            if self._distribution.one_at_a_time:
                jax.block_until_ready((outputs, values, local, aggregated))
        except Exception as error:
            if any(array.is_deleted() for array in (*written, *local)):
                error.add_note(
                    "keras_strategy: the step had begun, and the variables that it "
                    "assigns are lost. Load them from a checkpoint to go on."
                )
            raise
        if self._distribution.home is None:
            state.give(program.written, values)
        else:
            keras_state.set_arrays(program.written, self._distribution.kept(values))
        program.release_seed()
        if local:
            on_read.remember(program.local, aggregated, local)
        return outputs, totals

    def state(self, program: Program) -> tuple[list, list, list]:
        """The values of the variables that a program is called with."""
        sharding_of = self._distribution.sharding_of
        for variable in program.others:
            marks.forget(variable)  # they may be on other devices
        return (
            state.to_overwrite(program.written, sharding_of),
            [on_read.locals_of(v, self._distribution) for v in program.local],
            state.to_read(program.read, sharding_of),
        )
