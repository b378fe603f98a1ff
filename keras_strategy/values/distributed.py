"""What a value is when every replica has its own."""

import enum
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import tree

from keras_strategy.values.keys import is_same, value_key


class ReduceOp(enum.Enum):
    """How the values of the replicas become one value.

    Wherever a `ReduceOp` is expected, its name in any case does as well:
    `"sum"`, `"SUM"`, `"Mean"`.

    Attributes:
        SUM: Add the values.
        MEAN: Add the values and divide by how many there are.

    Example:

    ```python
    import keras_strategy as ks

    assert ks.ReduceOp("SUM") is ks.ReduceOp.SUM
    ```
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def parse(cls, reduce_op: Any) -> "ReduceOp":
        """Returns the `ReduceOp` that `reduce_op` names.

        Args:
            reduce_op: A `ReduceOp`, or its name in any case.

        Returns:
            The `ReduceOp`.

        Raises:
            ValueError: If `reduce_op` is neither.

        Example:

        ```python
        import keras_strategy as ks

        assert ks.ReduceOp.parse("mean") is ks.ReduceOp.MEAN
        ```
        """
        if isinstance(reduce_op, cls):
            return reduce_op
        # `tf.distribute.ReduceOp` is an enum of the same names.
        name = reduce_op.name if isinstance(reduce_op, enum.Enum) else reduce_op
        if isinstance(name, str) and name.upper() in cls.__members__:
            return cls[name.upper()]
        raise ValueError(
            "Argument `reduce_op` must be a `ReduceOp` or one of "
            f"{sorted(cls.__members__)} in any case. Received: "
            f"reduce_op={reduce_op!r}"
        )


class DistributedValues:
    """A value that has one component for each replica of this worker.

    `strategy.run` gives and takes such values; user code seldom makes one
    except through `strategy.experimental_distribute_values_from_function`.
    Use `strategy.experimental_local_results` to get at the components.

    Args:
        values: The components, in the order of the replicas.

    Attributes:
        count: The number of components; None in a program of all replicas, where each
            of them sees its own alone.
    """

    count: int | None = None

    def __init__(self, values: Sequence[Any]):
        values = tuple(values)
        if not values:
            raise ValueError(
                "Argument `values` must hold one value for each replica. "
                f"Received: values={values!r}"
            )
        self._values = values
        self.count = len(values)

    @property
    def values(self) -> tuple[Any, ...]:
        """The components of this worker, in the order of the replicas."""
        return self._values

    def __repr__(self) -> str:
        parts = (f"  {i}: {value!r}" for i, value in enumerate(self.values))
        return f"{type(self).__name__}:{{\n" + ",\n".join(parts) + "\n}"


def is_no_tensor(value: DistributedValues, *args: Any, **kwargs: Any) -> Any:
    """Refuses to make one tensor of a distributed value.

    Each engine has its own name for the method that is asked for one.

    Raises:
        TypeError: Always.
    """
    number = "several" if value.count is None else value.count
    instead = "make a tensor of it with `reduce` or `gather` of its strategy"
    if isinstance(value, Mirrored):
        instead = "update a variable by it, with `strategy.extended.update`"
    raise TypeError(
        f"A distributed value is no tensor: it has {number} component(s), one for "
        "each replica. Give it to `strategy.run` as an argument, where each replica "
        f"gets its own; or {instead}. Received: {value!r}"
    )


class PerReplica(DistributedValues):
    """A value that may differ from replica to replica.

    Attributes:
        batch: The `core.row_range.BatchRows` of the element of a distributed dataset
            that it is a part of; None for any other value.
    """

    batch: Any = None


class Mirrored(DistributedValues):
    """A value that is the same on every replica."""


class ValueContext:
    """Tells a function which replica it makes a value for.

    Args:
        replica_id_in_sync_group: The replica's number, from 0.
        num_replicas_in_sync: The number of replicas over all workers.

    Example:

    ```python
    import keras_strategy as ks

    def rows_of_one_replica(context: ks.experimental.ValueContext):
        return [context.replica_id_in_sync_group] * context.num_replicas_in_sync

    value = ks.MirroredStrategy().experimental_distribute_values_from_function(
        rows_of_one_replica
    )
    ```
    """

    def __init__(
        self, replica_id_in_sync_group: int = 0, num_replicas_in_sync: int = 1
    ):
        self._replica_id_in_sync_group = replica_id_in_sync_group
        self._num_replicas_in_sync = num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> int:
        """The replica's number, from 0."""
        return self._replica_id_in_sync_group

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas over all workers."""
        return self._num_replicas_in_sync

    def __repr__(self) -> str:
        return (
            f"ValueContext(replica_id_in_sync_group={self.replica_id_in_sync_group}, "
            f"num_replicas_in_sync={self.num_replicas_in_sync})"
        )


def sum_of_copies(value: Any) -> ValueError:
    """The error for a SUM over replicas that all hold the same value."""
    return ValueError(
        "Argument `value` holds a value that is not distributed, the same for "
        "all replicas, so it has no SUM over the replicas. Reduce a tensor that "
        "`strategy.run` returned (a number of Python's is a constant, as is what "
        "`keras.ops.shape` gives: `keras.ops.convert_to_tensor` makes a tensor of it), "
        f"or multiply by `strategy.num_replicas_in_sync`. Received: {value!r}"
    )


def is_numeric_array(value: Any) -> bool:
    """Whether `value` is of NumPy and can become a tensor: no text, no objects."""
    is_array = isinstance(value, np.ndarray | np.generic)
    return is_array and value.dtype.kind in "biufc"


def map_leaves(fn: Callable[[Any], Any], structure: Any) -> Any:
    """Does what `keras.tree.map_structure` does for one structure, in less time.

    A step maps the same small structures again and again.

    Args:
        fn: A function of a leaf.
        structure: The structure.
    """
    kind = type(structure)
    if kind is tuple or kind is list:
        return kind([map_leaves(fn, part) for part in structure])
    if kind is dict:
        return {key: map_leaves(fn, part) for key, part in structure.items()}
    return tree.map_structure(fn, structure)


def of_another_strategy(
    value: DistributedValues, method: str, replicas: int
) -> ValueError:
    """The error for a value that has not one component for each replica.

    Args:
        value: The value.
        method: The method that was given it.
        replicas: The number of replicas of this worker.
    """
    return ValueError(
        f"`{method}` was given a value of another strategy: it has {value.count} "
        f"component(s), and the strategy has {replicas} replica(s) on this worker. "
        "`reduce` or `gather` of the strategy that it is of make a tensor of it, which "
        f"every strategy takes. Received: {value!r}"
    )


def select_replica(
    structure: Any, replica: int, replicas: int, method: str = "run"
) -> Any:
    """Returns `structure` with one replica's part of distributed values.

    Args:
        structure: The structure.
        replica: The number of the replica on this worker.
        replicas: How many there are.
        method: What was given the structure.

    Raises:
        ValueError: If a value has another number of components.
    """

    def part(leaf):
        if not isinstance(leaf, DistributedValues):
            return leaf
        values = leaf.values
        if len(values) != replicas:
            raise of_another_strategy(leaf, method, replicas)
        return values[replica]

    return map_leaves(part, structure)


def regroup(
    outputs: Sequence[Any],
    is_tensor: Callable[[Any], bool],
    kind: type[DistributedValues] = PerReplica,
    one_of_many: bool = False,
    of_variables: Callable[[Sequence[Any]], Any] | None = None,
) -> Any:
    """Joins what the replicas returned into one structure.

    Args:
        outputs: What each replica returned, in the order of the replicas.
        is_tensor: Tells the tensors of the backend in use.
        kind: What tensors become.
        one_of_many: Whether there are replicas on other workers, so that the output
            of a single one is distributed too.
        of_variables: What the replicas' variables become, which are mostly the same
            one; None if that stays a variable.

    Returns:
        The structure of one output. Tensors and NumPy values become
        distributed values of the kind; distributed values, and Python constants that
        are equal on all replicas, stay what they are. With one replica, its output as
        it is.

    Raises:
        ValueError: If the replicas returned different structures.
    """
    if len(outputs) == 1 and not one_of_many:
        return outputs[0]
    first = outputs[0]
    for replica, output in enumerate(outputs[1:], start=1):
        try:
            tree.assert_same_structure(first, output)
        except (ValueError, TypeError) as error:
            raise ValueError(
                "A function that is called for every replica must return the same "
                f"structure for each. Received: {first!r} from replica "
                f"0 and {output!r} from replica {replica}."
            ) from error

    def join(*leaves):
        if isinstance(leaves[0], keras.Variable | DistributedValues):
            if of_variables is not None and isinstance(leaves[0], keras.Variable):
                return of_variables(leaves)
            # It is of all replicas already.
            return leaves[0] if all(x is leaves[0] for x in leaves) else kind(leaves)
        if is_tensor(leaves[0]) or hasattr(leaves[0], "__array__"):
            return kind(leaves)
        first = leaves[0]
        if all(map(is_same, leaves, itertools.repeat(first))):
            return first
        # Of values that are not Python's own, what they say themselves.
        if value_key(first) is None and all(leaf == first for leaf in leaves):
            return first
        return kind(leaves)

    if len(outputs) == 1:
        return map_leaves(join, first)
    return tree.map_structure(join, *outputs)
