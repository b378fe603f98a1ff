"""Compiled functions of `run`: their arguments, variables and programs.

A program is compiled for the structure, shapes and Python constants of its arguments,
which make up its cache key, and for the Keras variables that the function uses. A JAX
program has no state: it receives the variables' values and returns the new ones.
Tracing discovers the variables. A trace that meets a new variable is discarded, and the
next one passes it.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras import tree

from keras_strategy.backends.jax import internals
from keras_strategy.backends.jax.collectives import (
    LocalBatches,
    ShardedPerReplica,
    UnevenPerReplica,
    is_array,
    shapes_and_dtypes,
    to_sharded,
)
from keras_strategy.backends.jax.distribution import ReplicaDistribution, put
from keras_strategy.keras_patches.internals import stored_dtype
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
    """A leaf that is an input or output of the program."""

    split: bool  # each replica has a component
    scalar: bool = False
    is_batch: bool = False  # rows of a distributed dataset
    # The index of an output's sum among the program's sums over replicas.
    total: int | None = None


# Arguments use these instances, which are compared by identity: that is fast.
_REPLICATED = Tensor(split=False)
_COMPONENTS = Tensor(split=True)
_BATCH_ROWS = Tensor(split=True, is_batch=True)
_SCALARS = Tensor(split=True, scalar=True)


@dataclass(slots=True)
class Arguments:
    """The arguments of one call: a structure with Constant and Tensor leaves."""

    structure: Any
    arrays: list[Any]  # of the Tensor leaves; virtual replicas may have `LocalBatches`
    key: Any  # calls with equal keys can use one program
    # This worker knows the others' distributed values, which programs or datasets made.
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

    def describe(self) -> list[Any]:
        """Return, as JSON values, what must be equal on all workers for one program."""
        remaining = iter(self.arrays)

        def leaf(x):
            if isinstance(x, Tensor):
                array = next(remaining)
                if isinstance(array, LocalBatches):
                    return ["batch", array.rows]
                return [x.split, x.scalar, str(array.dtype), list(array.shape)]
            if x.value is None or isinstance(x.value, bool | int | float | str):
                return repr(x.value)
            return type(x.value).__name__

        # `is_global` decides if later calls compare: all workers must, or none.
        return [self.is_global, *map(leaf, tree.flatten(self.structure))]


def flatten_arguments(
    args: tuple, kwargs: dict, distribution: ReplicaDistribution
) -> Arguments:
    """Separate arrays, which are placed on the devices, from constants."""
    # Raise `DifferentReplicas` if the components of a value differ.
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
            is_global = is_global and (is_placed or isinstance(x, LocalBatches))
            if x.count != replicas:
                raise wrong_strategy_error(x, "run", replicas)
            if isinstance(x, UnevenPerReplica):
                raise DifferentReplicas(x)
            if isinstance(x, LocalBatches):
                arrays.append(x)
                return _COMPONENTS
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
        # Python numbers are constants, as in tf.function: a function may use them as a
        # range or a shape. Arrays of objects are left to the trace.
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
            value = value_key(x.value)
            key.append(IdentityKey(x.value) if value is None else value)
        else:
            array = next(remaining)
            if isinstance(array, LocalBatches):
                key += (x, array.rows, array.layouts)
                continue
            aval = array.aval
            key += (x, aval.shape, aval.dtype, aval.weak_type)
    return Arguments(structure, arrays, tuple(key), is_global)


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
    """A function, the variables that it uses and its compiled programs."""

    def __init__(self):
        self.variables: dict[int, Any] = {}
        self.written: set[int] = set()
        self.seed: Any = None  # the state of the global seed, if it uses that
        self.programs: OrderedDict[Any, Program] = OrderedDict()
        self.without_program: set[Any] = set()  # the keys of arguments
        self.draws = BatchDimCache()
        self.is_traced = False  # a trace has met all variables
        self._warned = False

    def assigned(self) -> list[Any]:
        """Return the assigned variables, except for the global seed."""
        return [
            self.variables[key]
            for key in self.written
            if not internals.is_global_seed(self.variables[key])
        ]

    def record(self, scope: RunScope) -> bool:
        """Record a trace's variables; return True if any of them is new."""
        before = len(self.variables), len(self.written)
        self.variables.update(scope.used)
        self.written.update(scope.written)
        seed = internals.global_seed()
        if id(seed) in self.variables:
            self.seed = seed
        return before != (len(self.variables), len(self.written))

    def renew_seed(self) -> None:
        """Use the global seed that `keras.utils.set_random_seed` may have replaced."""
        if self.seed is None or internals.is_global_seed(self.seed):
            return
        self.variables.pop(id(self.seed))
        self.written.discard(id(self.seed))
        self.seed = internals.ensure_global_seed()
        self.variables[id(self.seed)] = self.seed
        self.written.add(id(self.seed))

    def add_program(self, program: "Program", key: Any, fn: Any) -> None:
        self.programs[key] = program
        if len(self.programs) > MAX_PROGRAMS:
            self.programs.popitem(last=False)
        if len(self.programs) > MANY_PROGRAMS and not self._warned:
            self._warned = True
            warn_many_programs(fn, len(self.programs))


class Outputs(NamedTuple):
    """A function's outputs: a structure with Constant and Tensor leaves, and arrays."""

    # The program returns it, as JAX may trace again after a change of its settings.
    structure: IdentityKey
    arrays: Sequence[Any]


jax.tree_util.register_pytree_node(
    Outputs, lambda outputs: (outputs.arrays, outputs.structure), Outputs
)


@dataclass(eq=False)
class Program:
    name: str
    call: Callable[..., Any]
    written: list[Any]  # mirrored variables that it assigns
    read: list[Any]  # other mirrored variables
    local: list[Any]  # sync-on-read variables
    foreign: list[Any]  # mirrored variables of other strategies
    seed_index: int | None  # of the global seed's state in `written`
