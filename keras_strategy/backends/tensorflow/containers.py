"""Native strategies with readable variables, and with a shard for each replica.

In cross-replica context, `variable.value` is native tf.distribute's container of the
replicas' components. It takes part in computations as a tensor does, but it does not
convert to NumPy or Python numbers as a `tf.Variable` of one device does, and a
`tf.function` takes one container for another of the same shape.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.values import MirroredVariable, SyncOnReadVariable


class ObjectTraceType(tf.types.experimental.TraceType):
    """Trace type of an argument that a `tf.function` is specialized on by identity.

    Args:
        value: The argument.
        placeholder: The object that the traced function gets in its place.
    """

    def __init__(self, value: Any, placeholder: Any):
        self.value = value
        self._placeholder = placeholder

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, ObjectTraceType) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def is_subtype_of(self, other: Any) -> bool:
        return self == other

    def most_specific_common_supertype(self, others: Any) -> "ObjectTraceType | None":
        return self if all(self == other for other in others) else None

    def placeholder_value(self, placeholder_context: Any) -> Any:
        return self._placeholder

    def to_tensors(self, value: Any) -> list[Any]:
        return []

    def cast(self, value: Any, casting_context: Any) -> Any:
        return value


class _ReadableVariable:
    """Conversions that a `tf.Variable` of one device supports."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array(_tensor(self).__array__(), dtype=dtype)

    def __bool__(self) -> bool:
        return bool(_tensor(self))

    def __complex__(self) -> complex:
        return complex(_tensor(self))

    def __float__(self) -> float:
        return float(_tensor(self))

    def __int__(self) -> int:
        return int(_tensor(self))

    def __tf_tracing_type__(self, context: Any) -> ObjectTraceType:
        return ObjectTraceType(self, self)


def _tensor(variable: Any) -> Any:
    return tf.convert_to_tensor(variable)


class _ReadableMirrored(_ReadableVariable, MirroredVariable):
    pass


class _ReadableSyncOnRead(_ReadableVariable, SyncOnReadVariable):
    pass


_READABLE = {
    MirroredVariable: _ReadableMirrored,
    SyncOnReadVariable: _ReadableSyncOnRead,
}


# The base of the mixins: native strategy classes, which have no annotations.
_NativeExtended: Any = object


class ReadableVariablesMixin(_NativeExtended):
    """Native strategy whose variables convert to NumPy and Python numbers."""

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        variable = super()._create_variable(next_creator, **kwargs)
        # The native method has no parameter for the classes.
        variable.__class__ = _READABLE.get(type(variable), type(variable))
        return variable


class InitialShardsMixin(_NativeExtended):
    """Native strategy that can give each replica an initial value of its own.

    Attributes:
        shards: The initial values of the local replicas' components; None if all of
            them get the same.
    """

    shards: Sequence[Any] | None = None

    @contextlib.contextmanager
    def initial_shards(self, shards: Sequence[Any]) -> Iterator[None]:
        """Context manager that creates a variable from one value for each replica."""
        self.shards = shards
        try:
            yield
        finally:
            self.shards = None

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: Any, primary_var: Any, **kwargs: Any
    ) -> Any:
        if self.shards is not None:
            return self.shards[replica_id]
        return super()._get_variable_creator_initial_value(
            replica_id, device, primary_var, **kwargs
        )
