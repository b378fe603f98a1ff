"""Compiled functions of `run`: their arguments, variables and programs.

A program is compiled for the structure, shapes and Python constants of its arguments,
which make up its cache key, and for the Keras variables that the function uses. A JAX
program has no state: it receives the variables' values and returns the new ones.
Tracing discovers the variables. A trace that meets a new variable is discarded, and the
next one passes it.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras import tree

from keras_strategy.backends.jax import patches_state as keras_state
from keras_strategy.backends.jax.distribution import ReplicaDistribution, put
from keras_strategy.backends.jax.values import (
    ShardedPerReplica,
    UnevenPerReplica,
    is_array,
    shapes_and_dtypes,
    to_sharded,
)
from keras_strategy.keras_patches.variables_optimizers import stored_dtype
from keras_strategy.training import random
from keras_strategy.training.compile_cache import (
    MANY_PROGRAMS,
    MAX_PROGRAMS,
    IdentityKey,
    warn_many_programs,
)
from keras_strategy.training.random import BatchDimCache
from keras_strategy.training.train_step import find_batch_rows, has_batch_rows
from keras_strategy.values import (
    DistributedValues,
    PerReplica,
    is_numeric_array,
    is_same,
    value_key,
    wrong_strategy_error,
)

# Types that are no structures of other arguments.
_LEAF_TYPES = (ShardedPerReplica, jax.Array, np.ndarray)


class DifferentReplicas(Exception):
    """A PerReplica value has components that one program cannot serve."""


@dataclass(frozen=True)
class Constant:
    """A leaf that the program is compiled for: None, a string, a model, a number."""

    value: Any


@dataclass(frozen=True, eq=False)
class Tensor:
    """A leaf that is an input or output of the program.

    Compared by identity, which is fast: arguments use the four instances below.

    Attributes:
        split: Each replica has a component.
        scalar: The component is a scalar.
        is_batch: The component is rows of a distributed dataset.
        total: The index of an output's sum among the program's sums over replicas.
    """

    split: bool
    scalar: bool = False
    is_batch: bool = False
    total: int | None = None


_REPLICATED = Tensor(split=False)
_COMPONENTS = Tensor(split=True)
_BATCH_ROWS = Tensor(split=True, is_batch=True)
_SCALARS = Tensor(split=True, scalar=True)


@dataclass(slots=True)
class Arguments:
    """The arguments of one call.

    Attributes:
        structure: The structure of `(args, kwargs)` with Constant and Tensor leaves.
        arrays: The global arrays of the Tensor leaves, in order.
        key: The cache key: equal for calls that one program can serve.
        is_global: True if this worker knows the other workers' distributed values,
            such as a program's outputs or a dataset's elements.
    """

    structure: Any
    arrays: list[jax.Array]
    key: Any
    is_global: bool

    def restore(self, tensors: list[Any]) -> tuple[tuple, dict]:
        """Rebuild one replica's arguments from the traced tensors."""
        remaining = iter(tensors)

        def leaf(x):
            if isinstance(x, Constant):
                return x.value
            tensor = next(remaining)
            return tensor[0] if x.scalar else tensor

        return tree.map_structure(leaf, self.structure)


def flatten_arguments(
    args: tuple, kwargs: dict, distribution: ReplicaDistribution
) -> Arguments:
    """Separate arrays, which are placed on the devices, from constants.

    Python numbers are constants, as in tf.function: a function may use them as a
    range or a shape. A number that changes with every step should be an array.

    Raises:
        DifferentReplicas: If the components of a value differ in shape or dtype, or in
            a constant.
        ValueError: If a value has a wrong number of components.
    """
    if not kwargs:
        # Fast path for a dataset's values. The general path dominates a step's cost.
        leaves, arrays = [], []
        key: list[Any] = [len(args)]
        batch, exact = None, random.settings.exact
        for x in args:
            if type(x) is not ShardedPerReplica or x.distribution is not distribution:
                break
            leaf, aval = _SCALARS if x.scalars else _COMPONENTS, x.array.aval
            if leaf is _COMPONENTS and x.batch is not None and exact:
                leaf, batch = _BATCH_ROWS, batch or x.batch
                if x.batch is not batch:
                    break
            leaves.append(leaf)
            arrays.append(x.array)
            key += (leaf, aval.shape, aval.dtype, aval.weak_type)
        else:
            return Arguments((tuple(leaves), {}), arrays, tuple(key), True)
    return _flatten_general((args, kwargs), distribution)


def _flatten_general(arguments: Any, distribution: ReplicaDistribution) -> Arguments:
    arrays, replicas, is_global = [], len(distribution.devices), True
    batch = find_batch_rows(*arguments)

    def leaf(x):
        nonlocal is_global
        if isinstance(x, DistributedValues):
            is_placed = isinstance(x, ShardedPerReplica) and x.belongs_to(distribution)
            is_global = is_global and is_placed
            if x.count != replicas:
                raise wrong_strategy_error(x, "run", replicas)
            if isinstance(x, UnevenPerReplica):
                raise DifferentReplicas(x)
            if isinstance(x, ShardedPerReplica) or all(map(is_array, x.values)):
                if not is_placed and len(set(shapes_and_dtypes(x.values))) > 1:
                    raise DifferentReplicas(x)
                value = to_sharded(x, distribution)
                arrays.append(value.array)
                if value.scalars:
                    return _SCALARS
                has_rows = batch is not None and has_batch_rows(x)
                return _BATCH_ROWS if has_rows else _COMPONENTS
            first = x.values[0]
            if all(is_same(c, first) for c in x.values[1:]):
                return Constant(first)
            raise DifferentReplicas(x)
        # Python numbers and arrays of objects are left to the trace.
        if isinstance(x, jax.Array) or is_numeric_array(x):
            arrays.append(put(jnp.asarray(x), distribution.everywhere))
            return _REPLICATED
        return Constant(x)

    args, kwargs = arguments
    if not kwargs and all(isinstance(x, _LEAF_TYPES) for x in args):
        leaves = [leaf(x) for x in args]
        structure, structure_key = (tuple(leaves), {}), len(leaves)
    else:
        structure = tree.map_structure(leaf, arguments)
        leaves = tree.flatten(structure)
        structure_key = jax.tree.structure(tree.map_structure(lambda _: 0, structure))
    key: list[Any] = [structure_key]
    remaining = iter(arrays)
    for x in leaves:
        if isinstance(x, Constant):
            key.append(_constant_key(x.value))
        else:
            aval = next(remaining).aval
            key += (x, aval.shape, aval.dtype, aval.weak_type)
    return Arguments(structure, arrays, tuple(key), is_global)


def describe_arguments(arguments: Any, distribution: ReplicaDistribution) -> list[Any]:
    """Return, as JSON values, what must be equal on all workers for one program."""

    def leaf(x):
        if isinstance(x, ShardedPerReplica) and x.belongs_to(distribution):
            return ["global", str(x.array.dtype), list(x.array.shape)]
        if isinstance(x, DistributedValues):
            if not all(map(is_array, x.values)):
                return ["objects", *(_json_value(value) for value in x.values)]
            types = shapes_and_dtypes(x.values)
            return ["components", [[list(shape), dtype] for shape, dtype in types]]
        if isinstance(x, jax.Array) or is_numeric_array(x):
            return ["replicated", str(x.dtype), list(np.shape(x))]
        return ["constant", _json_value(x)]

    return [leaf(x) for x in tree.flatten(arguments)]


def is_uneven(arguments: Any) -> bool:
    """Return True if all workers know that one program cannot serve all replicas."""
    return any(isinstance(x, UnevenPerReplica) for x in tree.flatten(arguments))


def _json_value(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    return type(value).__name__


def repeat_first_replica(arguments: Any, replicas: int) -> Any:
    """Return the arguments with the first replica's components for all replicas."""
    return tree.map_structure(
        lambda x: (
            PerReplica([x.values[0]] * replicas)
            if isinstance(x, DistributedValues)
            else x
        ),
        arguments,
    )


def _constant_key(value: Any) -> Any:
    key = value_key(value)
    return IdentityKey(value) if key is None else key


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


@dataclass(eq=False)
class Program:
    """One compiled program and the variables that it passes.

    Attributes:
        name: The function's name.
        written: The mirrored variables that it assigns.
        read: The mirrored variables that it only reads.
        local: The sync-on-read variables.
        foreign: The mirrored variables that belong to other strategies.
        seed: The global seed's state, if the function uses it.
    """

    name: str
    written: list[Any]
    read: list[Any]
    local: list[Any]
    foreign: list[Any]
    seed: InitVar[Any]
    call: Callable[..., Any] = field(init=False)

    def __post_init__(self, seed: Any):
        indices = (i for i, v in enumerate(self.written) if v is seed)
        self._seed_index = next(indices, None)

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
