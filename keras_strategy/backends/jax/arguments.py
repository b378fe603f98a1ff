"""Compiled functions of `run`: their arguments, variables and programs.

A program is compiled for the structure, shapes and Python constants of its arguments,
which make up its cache key, and for the Keras variables that the function uses. A JAX
program has no state: it receives the variables' values and returns the new ones.
Tracing discovers the variables. A trace that meets a new variable is discarded, and the
next one passes it.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from keras import tree

from keras_strategy.backends.jax.distribution import ReplicaDistribution, put
from keras_strategy.backends.jax.sharded import (
    ShardedPerReplica,
    UnevenPerReplica,
    is_array,
    shapes_and_dtypes,
    to_sharded,
)
from keras_strategy.rules import draws
from keras_strategy.rules.batches import find_batch_rows, has_batch_rows
from keras_strategy.rules.reads import IdentityKey
from keras_strategy.values.distributed import (
    DistributedValues,
    PerReplica,
    is_numeric_array,
    wrong_strategy_error,
)
from keras_strategy.values.keys import is_same, value_key

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
        batch, exact = None, draws.settings.exact
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
            is_global = is_global and (
                isinstance(x, ShardedPerReplica) and x.belongs_to(distribution)
            )
            if x.count != replicas:
                raise wrong_strategy_error(x, "run", replicas)
            if isinstance(x, UnevenPerReplica):
                raise DifferentReplicas(x)
            if isinstance(x, ShardedPerReplica) or all(map(is_array, x.values)):
                value = _sharded(x, distribution)
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


def _sharded(
    value: DistributedValues, distribution: ReplicaDistribution
) -> ShardedPerReplica:
    if isinstance(value, ShardedPerReplica) and value.belongs_to(distribution):
        return value
    if len(set(shapes_and_dtypes(value.values))) > 1:
        raise DifferentReplicas(value)
    return to_sharded(value, distribution)


def _constant_key(value: Any) -> Any:
    key = value_key(value)
    return IdentityKey(value) if key is None else key
