"""Cache of compiled programs: a tf.function for each function that replicas run.

Running on several replicas eagerly is 20 to 40 times slower than in a tf.function. But
in every call a tf.function computes the type of each argument, binds all arguments by
name and compares them with those of its programs. For a training step of a few
milliseconds, that takes longer than all other Python code. So a call is looked up here
by the shapes and dtypes of its tensors, and a program that served such a call before is
called directly.

Traces that build layers or create variables are discarded. Replicas are traced one
after the other, so only the first finds layers unbuilt, and may take another branch
than the others.

Some checks depend on values, which a trace does not have. Programs make them when they
are executed.
"""

import contextlib
import functools
import itertools
import numbers
import operator
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree
from tensorflow.python.eager.lift_to_graph import UnliftableError

from keras_strategy.core.step_state import BatchRows
from keras_strategy.training.compile_cache import (
    MANY_PROGRAMS,
    MAX_PROGRAMS,
    IdentityKey,
    warn_many_programs,
)
from keras_strategy.training.train_step import add_shape_hint, find_batch_rows
from keras_strategy.values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    ReduceOp,
    value_key,
)

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
_TENSOR = object()  # the place of a tensor in a template


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
        self._function.get_concrete_function(arguments, _number_keys(arguments))

    def __call__(self, *arguments: Any) -> Any:
        key, tensors = _flatten_call(arguments)
        program = self._programs.get(key)
        if program is not None:
            concrete, reorder = program
            return concrete._call_flat([*reorder(tensors)], concrete.captured_inputs)
        call = arguments, _number_keys(arguments)
        outputs = self._function(*call)
        if key is not None:
            self._add_program(key, call, tensors)
        return outputs

    def _add_program(self, key: Any, call: Any, tensors: Sequence[Any]) -> None:
        """Remember the program that served a call, and the order of its tensors."""
        places = {id(tensor): place for place, tensor in enumerate(tensors)}
        if len(places) < len(tensors):  # a tensor occurs twice: the order is ambiguous
            return
        program = self._function.get_concrete_function(*call)
        if not hasattr(program, "_call_flat"):
            return
        types = program.function_type
        order = [places[id(x)] for x in types.unpack_inputs(types.bind(*call))]
        is_ordered = order == list(range(len(tensors)))
        # More than there are programs, since one program serves many shapes.
        if len(self._programs) >= 4 * MAX_PROGRAMS:
            self._programs.clear()
        reorder = list if is_ordered else operator.itemgetter(*order)
        self._programs[key] = program, reorder


def _flatten_call(arguments: Any) -> tuple[Any, list[Any]]:
    """Return the key that a program depends on, and the tensors."""
    # The key is None if only the tf.function can find the program.
    # This runs in every step, so it is one loop without function calls.
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


def _number_keys(arguments: Any) -> tuple[Any, ...]:
    """Return keys of Python numbers: a tf.function takes 1, True and 1.0 for equal."""
    keys = []
    for leaf in tree.flatten(arguments):
        values = leaf.values if isinstance(leaf, DistributedValues) else (leaf,)
        for x in values:
            if isinstance(x, numbers.Number) and not hasattr(x, "__array__"):
                keys.append(value_key(x) or type(x))
    return tuple(keys)


class CompiledFunction:
    """One function on every replica, as a tf.function."""

    # A tf.function returns only tensors, so a trace stores the structure of the outputs
    # with all other values as a template, whose index the tf.function returns as a key.

    def __init__(self, group: Any):
        self._group = group
        self._draws = False
        # A cached trace must not keep the function or its owner alive, so each call
        # brings the function.
        self._current = threading.local()
        self.traces = 0
        self._warned = self.is_converted = False
        self._discard_traces()

    def _discard_traces(self) -> None:
        self._templates: list[Any] = []
        programs = ProgramCache(functools.partial(self._trace, self._templates))
        self._programs = programs
        self._reducing = ProgramCache(functools.partial(self._trace_reduce, programs))

    def __call__(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        leaves = tree.flatten((args, kwargs))
        if any(map(isinstance, leaves, itertools.repeat(keras.Variable))):
            # Pass variables as they are: a tf.function would pass their values. It
            # compares an `IdentityKey` by value, because its `__slots__` allow no weak
            # reference.
            args, kwargs = tree.map_structure(
                lambda x: IdentityKey(x) if isinstance(x, keras.Variable) else x,
                (args, kwargs),
            )
        batch = find_batch_rows(leaves, {})
        batch_indices = []  # in a loop: a generator costs a call per item in each step
        if batch is not None:
            for index, leaf in enumerate(leaves):
                if isinstance(leaf, PerReplica) and leaf.batch is batch:
                    batch_indices.append(index)
        arguments = args, kwargs, tuple(batch_indices)
        if not self._templates:
            self._trace_until_built(fn, arguments)
        programs, templates = self._programs, self._templates
        if self._draws:
            self._group.seeds.refresh()
        self._current.fn = fn
        reductions, totals = self._group.reductions.begin(fn), []
        try:
            if reductions:
                outputs, totals = self._reducing(reductions, *arguments)
            else:
                outputs = programs(*arguments)
            ((index, tensors),) = outputs.items()
        except tf.errors.OpError as error:
            error.add_note(
                "TensorFlow writes variables in place: what the replicas assigned "
                "before this error stays assigned. Load a checkpoint to continue from "
                "a consistent state."
            )
            raise
        finally:
            del self._current.fn
        if len(templates) > MANY_PROGRAMS and not self._warned:
            self._warned = True
            warn_many_programs(fn, len(templates))
        if len(templates) > MAX_PROGRAMS:
            self._discard_traces()  # a tf.function never evicts a trace
        totals = dict(zip(reductions, totals, strict=True))
        self._group.reductions.finish(fn, tensors, totals)
        template, tensors = templates[int(index)], iter(tensors)
        if template is _TENSOR:  # the most frequent case
            return next(tensors)
        return tree.map_structure(
            lambda leaf: next(tensors) if leaf is _TENSOR else leaf, template
        )

    def convert(self) -> None:
        """Have AutoGraph convert the function, whose branches depend on tensors."""
        self.is_converted = True
        self._discard_traces()

    def _trace_until_built(self, fn: Callable[..., Any], arguments: tuple) -> None:
        """Trace the function, and discard the trace if something was built in it."""
        builds = self._group.builds
        self._current.fn = fn
        try:
            self._programs.trace(*arguments)
        except Exception as error:
            if self._group.builds == builds:
                if isinstance(error, UnliftableError):
                    error.add_note(
                        "The function creates a `tf.Variable`. Create it in the "
                        "strategy's scope, before `strategy.run`; or use a "
                        "`keras.Variable`, which the first call may create."
                    )
                raise
        finally:
            del self._current.fn
        if self._group.builds != builds:
            self._discard_traces()

    def _trace(self, templates, args, kwargs, batch_indices):
        if batch_indices:
            # The tf.function dropped the attribute. Without row counts, because a
            # program serves any number of rows.
            leaves, batch = tree.flatten((args, kwargs)), BatchRows()
            for index in batch_indices:
                leaves[index].batch = batch
        starts = self._group.seeds.starts
        args, kwargs = tree.map_structure(
            lambda x: x.it if isinstance(x, IdentityKey) else x, (args, kwargs)
        )
        fn = self._current.fn
        if self.is_converted:
            fn = getattr(fn, "python_function", fn)
            fn = functools.partial(tf.autograph.to_graph(_call), fn)
        outputs = self._group.call(fn, args, kwargs)
        self._draws |= self._group.seeds.starts > starts
        self.traces += 1
        tensors = []
        is_tf_function = hasattr(self._current.fn, "python_function")

        def take_tensors(leaf):
            values = leaf.values if isinstance(leaf, DistributedValues) else (leaf,)
            if is_tf_function and isinstance(values[0], numbers.Number):
                values = list(map(tf.convert_to_tensor, values))
                is_shared = not isinstance(leaf, DistributedValues)
                leaf = values[0] if is_shared else PerReplica(values)
            if not any(map(tf.is_tensor, values)):
                return leaf
            tensors.append(leaf)
            return _TENSOR

        templates.append(tree.map_structure(take_tensors, outputs))
        return {str(len(templates) - 1): tensors}

    def _trace_reduce(self, programs, reductions, *arguments):
        outputs = programs(*arguments)
        ((_, tensors),) = outputs.items()
        # Equal code may return something else, whose shapes a trace may not know.
        values = [tensors[i] if i < len(tensors) else None for i, _ in reductions]
        return outputs, [
            self._group.compute_reduce(ReduceOp[op], value, None)
            if _is_replica_scalar(value)
            else None
            for (_, op), value in zip(reductions, values, strict=True)
        ]


def _call(fn, *args, **kwargs):
    return fn(*args, **kwargs)


def _is_replica_scalar(value: Any) -> bool:
    return type(value) is PerReplica and all(
        x.shape.rank == 0 and (x.dtype.is_floating or x.dtype.is_integer)
        for x in value.values
    )


class RunReductions:
    """Scalars of `run` that `reduce` combines, in the next call by one program."""

    # By code, so that all workers reduce in the same calls, whatever they have traced.

    def __init__(self):
        self._by_code: dict[Any, tuple[tuple[int, str], ...]] = {}
        self._code: Any = None  # of the last call
        self._scalars: list[tuple[int, Any]] = []  # that it returned
        self._totals: dict[tuple[int, str], Any] = {}
        self._reduced: tuple[tuple[int, str], ...] = ()

    def begin(self, fn: Callable[..., Any]) -> tuple[tuple[int, str], ...]:
        """Return the place and the operation of each output to reduce."""
        if len(self._by_code) > 256:  # functions created on each call
            self._by_code.clear()
        self._by_code[self._code] = self._reduced
        self._code, self._scalars, self._totals, self._reduced = None, [], {}, ()
        return self._by_code.get(getattr(fn, "__code__", None), ())

    def finish(
        self,
        fn: Callable[..., Any],
        tensors: Sequence[Any],
        totals: dict[tuple[int, str], Any],
    ) -> None:
        self._code, self._totals = getattr(fn, "__code__", None), totals
        self._scalars = [x for x in enumerate(tensors) if _is_replica_scalar(x[1])]

    def reduce(self, op: ReduceOp, value: Any, compute: Callable[[], Any]) -> Any:
        for index, scalar in self._scalars:
            if scalar is value:
                key = index, op.name
                total = self._totals.pop(key, None)
                total = compute() if total is None else total
                if key not in self._reduced:
                    self._reduced += (key,)
                return total
        return compute()


_MARKER = "keras_strategy refuses this, for reason number"
_messages: list[str] = []


def require(condition: Any, message: str, numbers: Any = ()) -> Any:
    """Return an assertion of a scalar tensor, which `reraise_failed_checks` reports."""
    # The message ends with `numbers`, a vector.
    if message not in _messages:
        _messages.append(message)
    marker = f"{_MARKER} {_messages.index(message)}:"
    data = [marker, tf.cast(numbers, tf.int64), message]
    return tf.debugging.Assert(condition, data, summarize=100)


@contextlib.contextmanager
def reraise_failed_checks() -> Iterator[None]:
    """Context manager that raises `ValueError` for a failed `require` in a program."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = re.search(rf"{_MARKER} (\d+):\W*([\d ]*)", str(error))
        if found is None:
            add_shape_hint(error)
            raise
        refusal = ValueError(f"{_messages[int(found[1])]} {found[2]}".rstrip())
        refusal.add_note(
            "TensorFlow writes variables in place: what the step assigned before this "
            "error stays assigned."
        )
        raise refusal from None
