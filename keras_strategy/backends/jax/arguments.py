"""What a function is called with, taken apart into arrays and everything else."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras import tree

from keras_strategy.backends.jax.distribution import ReplicaDistribution, put
from keras_strategy.backends.jax.sharded import (
    ShardedPerReplica,
    UnevenPerReplica,
    is_array,
    joined,
    types_of,
)
from keras_strategy.rules import draws
from keras_strategy.rules.batches import batch_of, carries_rows
from keras_strategy.rules.reads import Identity
from keras_strategy.values.distributed import (
    DistributedValues,
    PerReplica,
    is_numeric_array,
    of_another_strategy,
)
from keras_strategy.values.keys import is_same, value_key

# What holds no other arguments.
_LEAVES = (ShardedPerReplica, jax.Array, np.ndarray)


class NotOneProgram(Exception):
    """A PerReplica value has components that one program cannot be compiled for."""


@dataclass(frozen=True)
class Constant:
    """A leaf that the program is compiled for: None, a string, a model, a number."""

    value: Any


@dataclass(frozen=True, eq=False)
class Tensor:
    """A leaf that the program is called with.

    Compared by identity, as Python does fastest: those of arguments are these three.

    Attributes:
        split: Whether every replica gets its part of it.
        scalar: Whether that part is a scalar.
        of_batch: Whether that part is rows of a distributed dataset.
        total: Of an output, which of the program's sums over the replicas is its own.
    """

    split: bool
    scalar: bool = False
    of_batch: bool = False
    total: int | None = None


_WHOLE = Tensor(split=False)
_PARTS = Tensor(split=True)
_ROWS = Tensor(split=True, of_batch=True)
_SCALARS = Tensor(split=True, scalar=True)


@dataclass(slots=True)
class Arguments:
    """The arguments of one call.

    Attributes:
        structure: Of `(args, kwargs)`, with a Constant or Tensor for each leaf.
        arrays: The arrays of the Tensor leaves, in order, placed on the devices.
        key: Equal for calls that one program can serve.
        of_all: Whether this worker knows what distributed values the others bring. It
            does of what a program of all workers returned, and of a dataset's elements.
    """

    structure: Any
    arrays: list[jax.Array]
    key: Any
    of_all: bool

    def restore(self, tensors: list[Any]) -> tuple[tuple, dict]:
        """The arguments of one replica, made of what the program got for the arrays."""
        remaining = iter(tensors)

        def leaf(x):
            if isinstance(x, Constant):
                return x.value
            tensor = next(remaining)
            return tensor[0] if x.scalar else tensor

        return tree.map_structure(leaf, self.structure)


def take_apart(
    args: tuple, kwargs: dict, distribution: ReplicaDistribution
) -> Arguments:
    """Places the arrays of arguments and tells them from the rest.

    Python numbers are constants, as in tf.function: a function may use them as a
    range or a shape. A number that changes with every step should be an array.

    Raises:
        NotOneProgram: If the replicas' parts of a value differ in shape or dtype, or
            in what is no tensor.
        ValueError: If a value has another number of components.
    """
    if not kwargs:
        # The usual call. What follows for any other takes longer than all else.
        leaves, arrays = [], []
        key: list[Any] = [len(args)]
        batch, exact = None, draws.settings.exact
        for x in args:
            if type(x) is not ShardedPerReplica or x.distribution is not distribution:
                break
            leaf, aval = _SCALARS if x.scalars else _PARTS, x.array.aval
            if leaf is _PARTS and x.batch is not None and exact:
                leaf, batch = _ROWS, batch or x.batch
                if x.batch is not batch:
                    break
            leaves.append(leaf)
            arrays.append(x.array)
            key += (leaf, aval.shape, aval.dtype, aval.weak_type)
        else:
            return Arguments((tuple(leaves), {}), arrays, tuple(key), True)
    return _taken_apart((args, kwargs), distribution)


def _taken_apart(arguments: Any, distribution: ReplicaDistribution) -> Arguments:
    """`take_apart` of what is not a few values of a dataset."""
    arrays, replicas, of_all = [], len(distribution.devices), True
    batch = batch_of(*arguments)

    def leaf(x):
        nonlocal of_all
        if isinstance(x, DistributedValues):
            of_all = of_all and (
                isinstance(x, ShardedPerReplica) and x.belongs_to(distribution)
            )
            if x.count != replicas:
                raise of_another_strategy(x, "run", replicas)
            if isinstance(x, UnevenPerReplica):
                raise NotOneProgram(x)
            if isinstance(x, ShardedPerReplica) or all(map(is_array, x.values)):
                value = _joined(x, distribution)
                arrays.append(value.array)
                if value.scalars:
                    return _SCALARS
                return _ROWS if batch is not None and carries_rows(x) else _PARTS
            first = x.values[0]
            if all(is_same(c, first) for c in x.values[1:]):
                return Constant(first)
            raise NotOneProgram(x)
        # Python numbers are left to the trace, and so are arrays of objects.
        if isinstance(x, jax.Array) or is_numeric_array(x):
            arrays.append(put(jnp.asarray(x), distribution.everywhere))
            return _WHOLE
        return Constant(x)

    args, kwargs = arguments
    if not kwargs and all(isinstance(x, _LEAVES) for x in args):
        leaves = [leaf(x) for x in args]
        structure, shape = (tuple(leaves), {}), len(leaves)
    else:
        structure = tree.map_structure(leaf, arguments)
        leaves = tree.flatten(structure)
        shape = jax.tree.structure(tree.map_structure(lambda _: 0, structure))
    key: list[Any] = [shape]
    remaining = iter(arrays)
    for x in leaves:
        if isinstance(x, Constant):
            key.append(_constant_key(x.value))
        else:
            aval = next(remaining).aval
            key += (x, aval.shape, aval.dtype, aval.weak_type)
    return Arguments(structure, arrays, tuple(key), of_all)


def described(arguments: Any, distribution: ReplicaDistribution) -> list[Any]:
    """What all workers must have in common to be one program, in values of JSON."""

    def leaf(x):
        if isinstance(x, ShardedPerReplica) and x.belongs_to(distribution):
            return ["all replicas'", str(x.array.dtype), list(x.array.shape)]
        if isinstance(x, DistributedValues):
            if not all(map(is_array, x.values)):
                return ["objects", *(_simple(value) for value in x.values)]
            types = types_of(x.values)
            return ["parts", [[list(shape), dtype] for shape, dtype in types]]
        if isinstance(x, jax.Array) or is_numeric_array(x):
            return ["whole", str(x.dtype), list(np.shape(x))]
        return ["constant", _simple(x)]

    return [leaf(x) for x in tree.flatten(arguments)]


def is_uneven(arguments: Any) -> bool:
    """Whether all workers know that one program does not serve all replicas."""
    return any(isinstance(x, UnevenPerReplica) for x in tree.flatten(arguments))


def _simple(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    return type(value).__name__


def of_first_replica(arguments: Any, replicas: int) -> Any:
    """The arguments as they would be if all replicas had those of the first."""
    return tree.map_structure(
        lambda x: (
            PerReplica([x.values[0]] * replicas)
            if isinstance(x, DistributedValues)
            else x
        ),
        arguments,
    )


def _joined(
    value: DistributedValues, distribution: ReplicaDistribution
) -> ShardedPerReplica:
    if isinstance(value, ShardedPerReplica) and value.belongs_to(distribution):
        return value
    if len(set(types_of(value.values))) > 1:
        raise NotOneProgram(value)
    return joined(value, distribution)


def _constant_key(value: Any) -> Any:
    key = value_key(value)
    return Identity(value) if key is None else key


def bare(leaf: Any) -> Any:
    """A variable's value in the place of the variable."""
    return leaf.value if isinstance(leaf, keras.Variable) else leaf
