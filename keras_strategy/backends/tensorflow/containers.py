"""Native variables of several replicas, as code that knows no replicas uses them.

Outside of replicas `variable.value` is such a container on TensorFlow. It takes part in
computations as a tensor does, but native tf.distribute lets nobody look at its numbers
as those of a `tf.Variable` of one device; and a `tf.function` takes one of them for
another of the same shape.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.values import MirroredVariable, SyncOnReadVariable


class SameObject(tf.types.experimental.TraceType):
    """The type of an argument that a `tf.function` is traced for, as it is.

    Args:
        it: The argument.
        placeholder: What the function gets in its place.
    """

    def __init__(self, it: Any, placeholder: Any):
        self.it = it
        self._placeholder = placeholder

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, SameObject) and self.it is other.it

    def __hash__(self) -> int:
        return id(self.it)

    def is_subtype_of(self, other: Any) -> bool:
        return self == other

    def most_specific_common_supertype(self, others: Any) -> "SameObject | None":
        return self if all(self == other for other in others) else None

    def placeholder_value(self, placeholder_context: Any) -> Any:
        return self._placeholder

    def to_tensors(self, value: Any) -> list[Any]:
        return []

    def cast(self, value: Any, casting_context: Any) -> Any:
        return value


class Unchanged:
    """An argument that a `tf.function` would take for a tensor, handed on as it is.

    Args:
        it: The argument.
    """

    def __init__(self, it: Any):
        self.it = it

    def __tf_tracing_type__(self, context: Any) -> SameObject:
        return SameObject(self.it, self)


def _tensor(variable: Any) -> Any:
    return tf.convert_to_tensor(variable)


class _Readable:
    """What a `tf.Variable` of one device can beside computing."""

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

    def __tf_tracing_type__(self, context: Any) -> SameObject:
        return SameObject(self, self)


class _ReadableMirrored(_Readable, MirroredVariable):
    pass


class _ReadableOnRead(_Readable, SyncOnReadVariable):
    pass


_READABLE = {MirroredVariable: _ReadableMirrored, SyncOnReadVariable: _ReadableOnRead}


# What the next class is mixed into: native classes, which have no annotations.
_Extended: Any = object


class MakesReadable(_Extended):
    """The part of a native strategy that makes its variables readable."""

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        made = super()._create_variable(next_creator, **kwargs)
        # The native method has no parameter for the classes.
        made.__class__ = _READABLE.get(type(made), type(made))
        return made


class BeginsWithParts(_Extended):
    """The part of a native strategy that gives each replica a first value of its own.

    Attributes:
        parts: What the local replicas' components of variables begin with; None where
            all of them begin with the same.
    """

    parts: Sequence[Any] | None = None

    @contextlib.contextmanager
    def beginning_with(self, parts: Sequence[Any]) -> Iterator[None]:
        """Surrounds what makes a variable of parts."""
        self.parts = parts
        try:
            yield
        finally:
            self.parts = None

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: Any, primary_var: Any, **kwargs: Any
    ) -> Any:
        if self.parts is not None:
            return self.parts[replica_id]
        return super()._get_variable_creator_initial_value(
            replica_id, device, primary_var, **kwargs
        )
