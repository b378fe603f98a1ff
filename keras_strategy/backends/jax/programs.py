"""The programs that a function was compiled to, and the variables that it uses."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras

from keras_strategy.backends.jax import hooks_state as keras_state
from keras_strategy.hooks.variables import stored_dtype
from keras_strategy.rules.draws import KnownDraws
from keras_strategy.rules.known_functions import (
    MANY_PROGRAMS,
    PROGRAMS,
    warn_of_many_programs,
)
from keras_strategy.rules.reads import Identity


class RunScope(keras.StatelessScope):
    """Holds the variables' values in a trace, and notes which ones it meets.

    Args:
        mapping: Pairs of a variable and its traced value.
    """

    def __init__(self, mapping: Any):
        super().__init__(collect_losses=True, initialize_variables=False)
        self.met: dict[int, Any] = {}
        self.written: dict[int, Any] = {}
        self.state_mapping.update((id(v), value) for v, value in mapping)

    def get_current_value(self, variable: Any) -> Any:
        self.met[id(variable)] = variable
        value = super().get_current_value(variable)
        if value is None:
            # This trace will be thrown away; a stand-in keeps the real value from
            # becoming a constant that Python code could look into.
            value = jnp.zeros(variable.shape, stored_dtype(variable))
        return value

    def add_update(self, update: tuple[Any, Any]) -> None:
        self.met[id(update[0])] = self.written[id(update[0])] = update[0]
        super().add_update(update)


class NewVariables(Exception):
    """A trace met variables that the program does not thread."""


class Function:
    """A function, the variables that it uses, and its compiled programs."""

    def __init__(self):
        self.variables: dict[int, Any] = {}
        self.written: set[int] = set()
        # The state of the process's own seed generator, if it is one of them.
        self.seed: Any = None
        self.programs: OrderedDict[Any, Program] = OrderedDict()
        self.draws = KnownDraws()
        self.warned = False
        # Whether a trace has met all its variables.
        self.known = False

    def assigned(self) -> list[Any]:
        """The variables that it assigns and that belong to a strategy."""
        return [
            self.variables[key]
            for key in self.written
            if not keras_state.is_global_seed(self.variables[key])
        ]

    def learn(self, scope: RunScope) -> bool:
        """Notes what a trace met; returns whether that was news."""
        before = len(self.variables), len(self.written)
        self.variables.update(scope.met)
        self.written.update(scope.written)
        seed = keras_state.global_seed()
        if id(seed) in self.variables:
            self.seed = seed
        return before != (len(self.variables), len(self.written))

    def renew_seed(self) -> None:
        """Threads the seed generator that the process has now.

        `keras.utils.set_random_seed` makes the process forget the one before.
        """
        if self.seed is None or keras_state.is_global_seed(self.seed):
            return
        self.variables.pop(id(self.seed))
        self.written.discard(id(self.seed))
        self.seed = keras_state.made_global_seed()
        self.variables[id(self.seed)] = self.seed
        self.written.add(id(self.seed))

    def keep(self, program: "Program", key: Any, fn: Any) -> None:
        """Keeps a program for the next call of its kind."""
        self.programs[key] = program
        if len(self.programs) > PROGRAMS:
            self.programs.popitem(last=False)
        if len(self.programs) > MANY_PROGRAMS and not self.warned:
            self.warned = True
            warn_of_many_programs(fn, len(self.programs))


class Outputs(NamedTuple):
    """What a function returned, as its program does.

    JAX traces a program again where its settings changed, and keeps each trace. So it
    keeps the structure as well, which may differ.

    Attributes:
        structure: The structure, with a Constant or Tensor for each leaf.
        arrays: The arrays of the Tensor leaves, in order.
    """

    structure: Identity
    arrays: Sequence[Any]


jax.tree_util.register_pytree_node(
    Outputs, lambda outputs: (outputs.arrays, outputs.structure), Outputs
)


class Program:
    """One compiled program, what it threads, and what it is called.

    Args:
        written: The variables that it assigns.
        read: Those that it reads.
        local: Those of which each replica has its own.
        others: Those of other strategies, among the first two.
        seed: The first ones' state of the process's own seed generator, or None.
        name: What it is called.
    """

    call: Callable[..., Any]

    def __init__(
        self,
        written: list,
        read: list,
        local: list,
        others: list,
        seed: Any,
        name: str,
    ):
        self.name = name
        self.written = written
        self.read = read
        self.local = local
        self.others = others
        self._seed = next((i for i, v in enumerate(written) if v is seed), None)

    def threads(self, scope: RunScope) -> bool:
        """Whether it has what a trace met, and writes what that assigned."""
        changed = {id(v) for v in (*self.written, *self.local)}
        known = changed.union(map(id, self.read))
        return scope.written.keys() <= changed and scope.met.keys() <= known

    def renew_seed(self) -> None:
        """See `Function.renew_seed`."""
        at = self._seed
        if at is not None and not keras_state.is_global_seed(self.written[at]):
            self.written[at] = keras_state.made_global_seed()

    def release_seed(self) -> None:
        """The process's own seed generator is bound to no devices after a call."""
        if self._seed is not None:
            seed = self.written[self._seed]
            keras_state.release(seed, keras_state.array_of(seed))
