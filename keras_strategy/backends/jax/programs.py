"""The programs of a compiled function and the variables that it uses."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras

from keras_strategy.backends.jax import hooks_state as keras_state
from keras_strategy.hooks.variables import stored_dtype
from keras_strategy.rules.draws import BatchDimCache
from keras_strategy.rules.known_functions import (
    MANY_PROGRAMS,
    MAX_PROGRAMS,
    warn_many_programs,
)
from keras_strategy.rules.reads import IdentityKey


class RunScope(keras.StatelessScope):
    """Variable values in a trace, and a record of the variables it uses."""

    def __init__(self, mapping: Any):
        super().__init__(collect_losses=True, initialize_variables=False)
        self.used: dict[int, Any] = {}
        self.written: dict[int, Any] = {}
        self.state_mapping.update((id(v), value) for v, value in mapping)

    def get_current_value(self, variable: Any) -> Any:
        self.used[id(variable)] = variable
        value = super().get_current_value(variable)
        if value is None:
            # This trace will be discarded. The stand-in prevents that the value becomes
            # a constant that Python code could inspect.
            value = jnp.zeros(variable.shape, stored_dtype(variable))
        return value

    def add_update(self, update: tuple[Any, Any]) -> None:
        self.used[id(update[0])] = self.written[id(update[0])] = update[0]
        super().add_update(update)


class NewVariables(Exception):
    """A trace used variables that the program does not pass."""


class Function:
    """A function, the variables that it uses and its compiled programs.

    Attributes:
        seed: The state of Keras's global seed generator, if the function uses it.
        is_traced: True once a trace has met all variables.
    """

    def __init__(self):
        self.variables: dict[int, Any] = {}
        self.written: set[int] = set()
        self.seed: Any = None
        self.programs: OrderedDict[Any, Program] = OrderedDict()
        self.draws = BatchDimCache()
        self.is_traced = False
        self._warned = False

    def assigned(self) -> list[Any]:
        """Return the assigned variables, except for the global seed."""
        return [
            self.variables[key]
            for key in self.written
            if not keras_state.is_global_seed(self.variables[key])
        ]

    def record(self, scope: RunScope) -> bool:
        """Record a trace's variables; return True if any of them is new."""
        before = len(self.variables), len(self.written)
        self.variables.update(scope.used)
        self.written.update(scope.written)
        seed = keras_state.global_seed()
        if id(seed) in self.variables:
            self.seed = seed
        return before != (len(self.variables), len(self.written))

    def renew_seed(self) -> None:
        """Use the current global seed generator.

        `keras.utils.set_random_seed` replaces the previous one.
        """
        if self.seed is None or keras_state.is_global_seed(self.seed):
            return
        self.variables.pop(id(self.seed))
        self.written.discard(id(self.seed))
        self.seed = keras_state.ensure_global_seed()
        self.variables[id(self.seed)] = self.seed
        self.written.add(id(self.seed))

    def add_program(self, program: "Program", key: Any, fn: Any) -> None:
        """Cache a program, and evict the oldest one if there are too many."""
        self.programs[key] = program
        if len(self.programs) > MAX_PROGRAMS:
            self.programs.popitem(last=False)
        if len(self.programs) > MANY_PROGRAMS and not self._warned:
            self._warned = True
            warn_many_programs(fn, len(self.programs))


class Outputs(NamedTuple):
    """A function's outputs, as its program returns them.

    JAX traces a program again if JAX's settings change and caches each trace. The
    structure is part of the outputs, because it may differ between traces.

    Attributes:
        structure: The structure with Constant and Tensor leaves.
        arrays: The arrays of the Tensor leaves, in order.
    """

    structure: IdentityKey
    arrays: Sequence[Any]


jax.tree_util.register_pytree_node(
    Outputs, lambda outputs: (outputs.arrays, outputs.structure), Outputs
)


class Program:
    """One compiled program and the variables that it passes.

    Args:
        written: The mirrored variables that it assigns.
        read: The mirrored variables that it only reads.
        local: The sync-on-read variables.
        foreign: The variables of `written` and `read` that belong to other strategies.
        seed: The variable of `written` that is the global seed's state, or None.
        name: The function's name.
    """

    call: Callable[..., Any]

    def __init__(
        self,
        written: list,
        read: list,
        local: list,
        foreign: list,
        seed: Any,
        name: str,
    ):
        self.name = name
        self.written = written
        self.read = read
        self.local = local
        self.foreign = foreign
        self._seed_index = next((i for i, v in enumerate(written) if v is seed), None)

    def covers(self, scope: RunScope) -> bool:
        """Return True if it passes all variables that a trace used and assigned."""
        assignable = {id(v) for v in (*self.written, *self.local)}
        readable = assignable.union(map(id, self.read))
        return scope.written.keys() <= assignable and scope.used.keys() <= readable

    def renew_seed(self) -> None:
        """Use the current global seed generator, see `Function.renew_seed`."""
        i = self._seed_index
        if i is not None and not keras_state.is_global_seed(self.written[i]):
            self.written[i] = keras_state.ensure_global_seed()

    def release_seed(self) -> None:
        """Detach the global seed's state from the strategy's devices after a call."""
        if self._seed_index is not None:
            seed = self.written[self._seed_index]
            keras_state.release(seed, keras_state.array_of(seed))
