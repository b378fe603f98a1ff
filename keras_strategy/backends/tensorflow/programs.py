"""Cache of compiled programs: a tf.function for each function that replicas run.

Running on several replicas eagerly is 20 to 40 times slower than in a tf.function. But
in every call a tf.function computes the type of each argument, binds all arguments by
name and compares them with those of its programs. For a training step of a few
milliseconds, that takes longer than all other Python code. So a call is looked up here
by the shapes and dtypes of its tensors, and a program that served such a call before is
called directly.
"""

import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from keras import tree

from keras_strategy.rules.known_functions import MAX_PROGRAMS
from keras_strategy.values.distributed import DistributedValues, Mirrored, PerReplica
from keras_strategy.values.keys import value_key

try:
    # The state besides arguments that makes a tf.function trace again.
    from tensorflow.python.eager.polymorphic_function.function_context import (
        make_function_context,
    )
except ImportError:  # in another TensorFlow: every call goes to the tf.function
    make_function_context = None

_EAGER_TENSOR = tf.__internal__.EagerTensor
_DISTRIBUTED = (PerReplica, Mirrored)
# Tensors of these dtypes have a type description besides their shape.
_HANDLE_DTYPES = (tf.resource, tf.variant)


class ProgramCache:
    """A tf.function of nested arguments, with a fast lookup of its programs."""

    def __init__(self, fn: Callable[..., Any]):
        self._function: Any = tf.function(
            lambda arguments, _: fn(*arguments), autograph=False, reduce_retracing=True
        )
        # TensorFlow counts calls for this warning, of which it sees few here.
        # `warn_many_programs` warns instead.
        self._function._omit_frequent_tracing_warning = True
        self._programs: dict[Any, tuple[Any, Callable]] = {}

    def trace(self, *arguments: Any) -> None:
        """Trace the function as for a call, without calling it."""
        self._function.get_concrete_function(arguments, _number_keys(arguments))

    def __call__(self, *arguments: Any) -> Any:
        key, tensors = _flatten_call(arguments)
        program = self._programs.get(key)
        if program is not None:
            concrete, reorder = program
            return concrete._call_flat([*reorder(tensors)], concrete.captured_inputs)
        call = arguments, _number_keys(arguments)
        outputs = self._function(*call)
        program = None if key is None else _find_program(self._function, call, tensors)
        if program is not None:
            if len(self._programs) >= 4 * MAX_PROGRAMS:  # one program serves many shapes
                self._programs.clear()
            self._programs[key] = program
        return outputs


def _flatten_call(arguments: Any) -> tuple[Any, list[Any]]:
    """Return the key that a program depends on, and the tensors.

    The key is None if only the tf.function can find the program. This runs in every
    step, so it is one loop without function calls.
    """
    if make_function_context is None or not tf.executing_eagerly():
        return None, []
    tensors, key, pending = [], [make_function_context()], [arguments]
    while pending:
        x = pending.pop()
        kind = type(x)
        if kind is _EAGER_TENSOR:
            dtype = x.dtype
            if dtype in _HANDLE_DTYPES:
                return None, []
            tensors.append(x)
            key += (dtype, x.shape)
        elif kind in _DISTRIBUTED:
            values = x.values
            key += (kind, len(values))
            pending += values
        elif kind is tuple or kind is list:
            key += (kind, len(x))
            pending += x
        elif kind is dict:
            key += (kind, tuple(x))
            pending += x.values()
        else:
            part = None if hasattr(x, "__array__") else value_key(x)
            if part is None:
                return None, []
            key.append(part)
    return tuple(key), tensors


def _find_program(
    function: Any, call: Any, tensors: Sequence[Any]
) -> tuple[Any, Callable] | None:
    """Find the program of a tf.function that served a call.

    Args:
        function: The tf.function.
        call: The arguments of the call.
        tensors: The tensors in them.

    Returns:
        The program, and a function that reorders tensors as the program expects them.
        None if they cannot be determined.
    """
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    if len(places) < len(tensors):  # a tensor occurs twice: the order is ambiguous
        return None
    program = function.get_concrete_function(*call)
    if not hasattr(program, "_call_flat"):
        return None
    types = program.function_type
    order = [places[id(x)] for x in types.unpack_inputs(types.bind(*call))]
    is_ordered = order == list(range(len(tensors)))
    return program, list if is_ordered else operator.itemgetter(*order)


def _number_keys(arguments: Any) -> tuple[Any, ...]:
    """Return keys of Python numbers: a tf.function takes 1, True and 1.0 for equal."""
    keys = []
    for leaf in tree.flatten(arguments):
        values = leaf.values if isinstance(leaf, DistributedValues) else (leaf,)
        for x in values:
            if isinstance(x, numbers.Number) and not hasattr(x, "__array__"):
                keys.append(value_key(x) or type(x))
    return tuple(keys)
