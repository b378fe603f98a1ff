"""Distributed values: one component for each replica."""

import enum
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import tree

# Objects of these types with equal values are indistinguishable.
_VALUE_TYPES = (type(None), bool, int, str, bytes, type(...), range)


def value_key(value: Any) -> Any:
    """Return a key that only indistinguishable values share; None if maybe mutable."""
    # `==` is not enough: True, 1 and 1.0 are equal, and so are 0.0 and -0.0.
    kind: Any = type(value)
    if kind in _VALUE_TYPES or isinstance(value, np.dtype):
        return kind, value
    if kind in (float, complex) or issubclass(kind, np.generic):
        return kind, repr(value)  # 0.0 differs from -0.0, and nan equals nan
    return None


def is_same(value: Any, other: Any) -> bool:
    """Return True if two objects are identical or indistinguishable values."""
    if value is other:
        return True
    key = value_key(value)
    return key is not None and key == value_key(other)


class ReduceOp(enum.Enum):
    """Reduction that combines the values of the replicas.

    Wherever a `ReduceOp` is expected, you can pass its name in any case:
    `"sum"`, `"SUM"`, `"Mean"`.

    Attributes:
        SUM: Add the values.
        MEAN: Add the values and divide by their number.

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
        """Return the `ReduceOp` that `reduce_op` names.

        Args:
            reduce_op: A `ReduceOp`, or its name in any case.

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
        # tf.distribute.ReduceOp is an enum with the same names.
        name = reduce_op.name if isinstance(reduce_op, enum.Enum) else reduce_op
        if isinstance(name, str) and name.upper() in cls.__members__:
            return cls[name.upper()]
        raise ValueError(
            "Argument `reduce_op` must be a `ReduceOp` or one of "
            f"{sorted(cls.__members__)} in any case. Received: reduce_op={reduce_op!r}"
        )


class DistributedValues:
    """A value with one component for each replica of this worker.

    `strategy.run` takes and returns such values. To create one, call
    `strategy.experimental_distribute_values_from_function`. To read the components,
    call `strategy.experimental_local_results`.

    Args:
        values: The components, in the order of the replicas.

    Attributes:
        count: The number of components; None inside a program that is compiled for
            all replicas, where only the current replica's component exists.

    Example:

    ```python
    import keras_strategy as ks

    values = ks.DistributedValues([1, 2])
    assert values.count == 2 and values.values == (1, 2)
    ```
    """

    count: int | None = None

    def __init__(self, values: Sequence[Any]):
        values = tuple(values)
        if not values:
            raise ValueError(
                "Argument `values` must contain one value for each replica. "
                f"Received: values={values!r}"
            )
        self._values = values
        self.count = len(values)

    @property
    def values(self) -> tuple[Any, ...]:
        """The components of this worker's replicas, in their order."""
        return self._values

    def __repr__(self) -> str:
        parts = (f"  {i}: {value!r}" for i, value in enumerate(self.values))
        return f"{type(self).__name__}:{{\n" + ",\n".join(parts) + "\n}"


# Each backend installs this as its conversion method.
def raise_not_a_tensor(value: DistributedValues, *args: Any, **kwargs: Any) -> Any:
    """Raise TypeError because a distributed value cannot become one tensor."""
    number = "several" if value.count is None else value.count
    alternative = "convert it to a tensor with its strategy's `reduce` or `gather`"
    if isinstance(value, Mirrored):
        alternative = "use it to update a variable, with `strategy.extended.update`"
    raise TypeError(
        f"A distributed value is not a tensor: it has {number} component(s), one for "
        "each replica. Pass it to `strategy.run` as an argument, so that each replica "
        f"receives its component, or {alternative}. Received: {value!r}"
    )


class PerReplica(DistributedValues):
    """A value that may differ from replica to replica.

    Attributes:
        batch: The `BatchRows` of a distributed dataset's element; otherwise None.
        number: The number of that element in its iteration; otherwise None.

    Example:

    ```python
    import keras_strategy as ks

    strategy = ks.OneDeviceStrategy("cpu:0")
    total = strategy.reduce("SUM", ks.PerReplica([3.0]), axis=None)
    assert float(total) == 3
    ```
    """

    batch: Any = None
    number: int | None = None


class Mirrored(DistributedValues):
    """A value that is the same on every replica.

    Example:

    ```python
    import keras_strategy as ks

    assert ks.Mirrored([2, 2]).values == (2, 2)
    ```
    """


# The slots are descriptors, so that a field exists on the class like a property.
@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class ValueContext:
    """Context of a function that creates the value of one replica.

    Args:
        replica_id_in_sync_group: The replica id, from 0.
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

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


def sum_of_copies_error(value: Any) -> ValueError:
    """Return the error for a SUM of a value that is not distributed."""
    return ValueError(
        "Argument `value` is not distributed: it is the same for all replicas, so its "
        "SUM over the replicas is undefined. Reduce a tensor that `strategy.run` "
        "returned (Python numbers, such as the result of `keras.ops.shape`, are "
        "constants: convert them with `keras.ops.convert_to_tensor`), or multiply by "
        f"`strategy.num_replicas_in_sync`. Received: {value!r}"
    )


def is_numeric_array(value: Any) -> bool:
    """Return True if `value` is a NumPy array or scalar with a numeric dtype."""
    is_array = isinstance(value, np.ndarray | np.generic)
    return is_array and value.dtype.kind in "biufc"


def map_leaves(fn: Callable[[Any], Any], structure: Any) -> Any:
    """Map the leaves of one structure, faster than `keras.tree.map_structure`."""
    kind = type(structure)
    if kind is tuple or kind is list:
        return kind([map_leaves(fn, part) for part in structure])
    if kind is dict:
        return {key: map_leaves(fn, part) for key, part in structure.items()}
    return tree.map_structure(fn, structure)


def wrong_strategy_error(
    value: DistributedValues, method: str, replicas: int
) -> ValueError:
    """Return the error for a value with a wrong number of components."""
    return ValueError(
        f"`{method}` received a value of another strategy: it has {value.count} "
        f"component(s), but this strategy has {replicas} replica(s) on this worker. "
        "Convert it to a tensor, which every strategy accepts, with `reduce` or "
        f"`gather` of the strategy that created it. Received: {value!r}"
    )


def select_replica(
    structure: Any, replica: int, replicas: int, method: str = "run"
) -> Any:
    """Replace distributed values by the component of one of the local `replicas`."""

    def select(leaf):
        if not isinstance(leaf, DistributedValues):
            return leaf
        values = leaf.values
        if len(values) != replicas:
            raise wrong_strategy_error(leaf, method, replicas)
        return values[replica]

    return map_leaves(select, structure)


def regroup(
    outputs: Sequence[Any],
    is_tensor: Callable[[Any], bool],
    value_type: type[DistributedValues] = PerReplica,
    always_distributed: bool = False,
    join_variables: Callable[[Sequence[Any]], Any] | None = None,
) -> Any:
    """Join the outputs of the replicas into one structure.

    Tensors and NumPy values become distributed values. Distributed values, and Python
    constants that are equal on all replicas, stay as they are. The output of a single
    replica is only distributed if other workers have replicas: `always_distributed`.
    `join_variables` converts the replicas' variables, which are mostly the same object.
    """
    first = outputs[0]
    if len(outputs) == 1 and not always_distributed:
        return first
    for replica, output in enumerate(outputs[1:], start=1):
        try:
            tree.assert_same_structure(first, output)
        except (ValueError, TypeError) as error:
            raise ValueError(
                "A function that runs on every replica must return the same structure "
                f"on each. Received: {first!r} from replica 0 and {output!r} from "
                f"replica {replica}."
            ) from error

    def join(*leaves):
        first = leaves[0]
        if isinstance(first, keras.Variable | DistributedValues):
            if join_variables is not None and isinstance(first, keras.Variable):
                return join_variables(leaves)
            return first if all(x is first for x in leaves) else value_type(leaves)
        if is_tensor(first) or hasattr(first, "__array__"):
            return value_type(leaves)
        if all(map(is_same, leaves, itertools.repeat(first))):
            return first
        # Objects that define their own equality.
        if value_key(first) is None and all(leaf == first for leaf in leaves):
            return first
        return value_type(leaves)

    if len(outputs) == 1:
        return map_leaves(join, first)
    return tree.map_structure(join, *outputs)
