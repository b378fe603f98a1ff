"""A tf.function whose programs are found without asking it.

In every call a tf.function makes a type of each argument, binds all of them by name and
compares them with those of its programs. For a training step of a few milliseconds that
takes longer than all else in Python. Here a call is told by the shapes and types of its
tensors, and a program that served such a call before is called with them.
"""

import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from keras import tree

from keras_strategy.rules.known_functions import PROGRAMS
from keras_strategy.values.distributed import DistributedValues, Mirrored, PerReplica
from keras_strategy.values.keys import value_key

try:
    # What beside arguments a tf.function traces anew for.
    from tensorflow.python.eager.polymorphic_function.function_context import (
        make_function_context,
    )
except ImportError:  # a TensorFlow that has it elsewhere: its tf.function is asked
    make_function_context = None

_TENSOR = tf.__internal__.EagerTensor
_DISTRIBUTED = (PerReplica, Mirrored)
# Each tensor of these types has a description of its own beside its shape.
_DESCRIBED = (tf.resource, tf.variant)


class Programs:
    """A tf.function of nested arguments.

    Args:
        fn: Is traced: `fn(*arguments)`.
    """

    def __init__(self, fn: Callable[..., Any]):
        self._function: Any = tf.function(
            lambda arguments, _: fn(*arguments), autograph=False, reduce_retracing=True
        )
        # It counts calls, of which it would see a few; what is traced often is told by
        # `warn_of_many_programs`.
        self._function._omit_frequent_tracing_warning = True
        self._known: dict[Any, tuple[Any, Callable]] = {}

    def trace(self, *arguments: Any) -> None:
        """Traces the function as for a call, which is not made."""
        self._function.get_concrete_function(arguments, _numbers(arguments))

    def __call__(self, *arguments: Any) -> Any:
        key, tensors = _taken_apart(arguments)
        program = self._known.get(key)
        if program is not None:
            concrete, in_order = program
            return concrete._call_flat([*in_order(tensors)], concrete.captured_inputs)
        given = arguments, _numbers(arguments)
        outputs = self._function(*given)
        program = None if key is None else _program_of(self._function, given, tensors)
        if program is not None:
            if len(self._known) >= 4 * PROGRAMS:  # of shapes that one of them serves
                self._known.clear()
            self._known[key] = program
        return outputs


def _taken_apart(arguments: Any) -> tuple[Any, list[Any]]:
    """What a program depends on, None if a tf.function must tell, and the tensors.

    Without a call for each part of them, since this is done in every step.
    """
    if make_function_context is None or not tf.executing_eagerly():
        return None, []
    tensors, key, left = [], [make_function_context()], [arguments]
    while left:
        x = left.pop()
        kind = type(x)
        if kind is _TENSOR:
            dtype = x.dtype
            if dtype in _DESCRIBED:
                return None, []
            tensors.append(x)
            key += (dtype, x.shape)
        elif kind in _DISTRIBUTED:
            values = x.values
            key += (kind, len(values))
            left += values
        elif kind is tuple or kind is list:
            key += (kind, len(x))
            left += x
        elif kind is dict:
            key += (kind, tuple(x))
            left += x.values()
        else:
            part = None if hasattr(x, "__array__") else value_key(x)
            if part is None:
                return None, []
            key.append(part)
    return tuple(key), tensors


def _program_of(
    function: Any, given: Any, tensors: Sequence[Any]
) -> tuple[Any, Callable] | None:
    """The program of a tf.function for a call that was made.

    Args:
        function: The tf.function.
        given: The arguments of the call.
        tensors: The tensors in them.

    Returns:
        The program, and what puts such tensors into the order that it takes them in.
        None if that cannot be told.
    """
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    if len(places) < len(tensors):  # one was given twice: which is which?
        return None
    program = function.get_concrete_function(*given)
    if not hasattr(program, "_call_flat"):
        return None
    types = program.function_type
    order = [places[id(x)] for x in types.unpack_inputs(types.bind(*given))]
    in_place = order == list(range(len(tensors)))
    return program, list if in_place else operator.itemgetter(*order)


def _numbers(arguments: Any) -> tuple[Any, ...]:
    """What a tf.function does not see of Python's numbers: 1, True and 1.0 differ."""
    found = []
    for leaf in tree.flatten(arguments):
        values = leaf.values if isinstance(leaf, DistributedValues) else (leaf,)
        for x in values:
            if isinstance(x, numbers.Number) and not hasattr(x, "__array__"):
                found.append(value_key(x) or type(x))
    return tuple(found)
