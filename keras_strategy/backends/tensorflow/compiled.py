"""Traces that build layers or create variables are discarded.

Replicas are traced one after the other, so only the first finds layers unbuilt, and may
have taken another branch than the others.
"""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import tree
from tensorflow.python.eager.lift_to_graph import UnliftableError

from keras_strategy.backends.tensorflow.containers import ObjectTraceType
from keras_strategy.backends.tensorflow.programs import ProgramCache
from keras_strategy.backends.tensorflow.replica import GroupState
from keras_strategy.backends.tensorflow.rows import (
    batch_argument_indices,
    restore_batch,
)
from keras_strategy.rules.known_functions import (
    MANY_PROGRAMS,
    MAX_PROGRAMS,
    CompileCache,
    warn_many_programs,
)
from keras_strategy.values.distributed import DistributedValues


class CompiledFunctions:
    """Compiled functions, which are evicted when their owners are garbage-collected.

    Args:
        call: Runs a function on every replica: `call(fn, args, kwargs)`.
        group_state: The state that the group's replicas share.
    """

    def __init__(
        self, call: Callable[[Callable, tuple, dict], Any], group_state: GroupState
    ):
        self._functions = CompileCache(lambda: _CompiledFunction(call, group_state))

    def __call__(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        compiled = self._functions.get(fn)
        traces = compiled.traces
        result = compiled(fn, args, kwargs)
        if compiled.traces > traces:
            self._functions.refresh(fn)
        return result


class _CompiledFunction:
    """One function on every replica, as a tf.function.

    A tf.function returns only tensors, so a trace stores the structure of the outputs
    with all other values as a template, and the tf.function returns its index as a key.

    Attributes:
        traces: How often the function was traced.
    """

    def __init__(self, call: Callable, group_state: GroupState):
        self._call = call
        self._group_state = group_state
        self._seeds = group_state.seeds
        self._draws = False
        # A cached trace must not keep the function or its owner alive, so each call
        # brings the function.
        self._current = threading.local()
        self.traces = 0
        self._warned = False
        self._reset()

    def _reset(self) -> None:
        templates: list[Any] = []

        def trace(args, kwargs, batch_indices):
            restore_batch(args, kwargs, batch_indices)
            return self._trace(templates, args, kwargs)

        self._templates = templates
        self._programs = ProgramCache(trace)

    def __call__(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        leaves = tree.flatten((args, kwargs))
        if any(map(isinstance, leaves, itertools.repeat(keras.Variable))):
            # Pass variables as they are, not their current values.
            args, kwargs = tree.map_structure(
                lambda x: _PassThrough(x) if isinstance(x, keras.Variable) else x,
                (args, kwargs),
            )
        batch_indices = batch_argument_indices(leaves)
        if not self._templates:
            self._trace_until_built(fn, args, kwargs, batch_indices)
        programs, templates = self._programs, self._templates
        if self._draws:
            self._seeds.refresh()
        self._current.fn = fn
        try:
            ((index, tensors),) = programs(args, kwargs, batch_indices).items()
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
            self._reset()  # a tf.function never evicts a trace
        template, tensors = templates[int(index)], iter(tensors)
        if template is _TENSOR:  # the most frequent case
            return next(tensors)
        return tree.map_structure(
            lambda leaf: next(tensors) if leaf is _TENSOR else leaf, template
        )

    def _trace_until_built(
        self, fn: Callable[..., Any], args: tuple, kwargs: dict, batch_indices: Any
    ) -> None:
        """Trace the function, and discard the trace if something was built in it."""
        builds = self._group_state.builds
        self._current.fn = fn
        try:
            self._programs.trace(args, kwargs, batch_indices)
        except Exception as error:
            if self._group_state.builds == builds:
                if isinstance(error, UnliftableError):
                    error.add_note(
                        "The function creates a `tf.Variable`. Create it in the "
                        "strategy's scope, before `strategy.run`; or use a "
                        "`keras.Variable`, which the first call may create."
                    )
                raise
        finally:
            del self._current.fn
        if self._group_state.builds != builds:
            self._reset()

    def _trace(self, templates, args, kwargs):
        starts = self._seeds.starts
        args, kwargs = tree.map_structure(
            lambda x: x.value if isinstance(x, _PassThrough) else x, (args, kwargs)
        )
        outputs = self._call(self._current.fn, args, kwargs)
        self._draws |= self._seeds.starts > starts
        tensors = [leaf for leaf in tree.flatten(outputs) if _has_tensors(leaf)]
        self.traces += 1
        templates.append(
            tree.map_structure(
                lambda leaf: _TENSOR if _has_tensors(leaf) else leaf, outputs
            )
        )
        return {str(len(templates) - 1): tensors}


class _PassThrough:
    """An argument that a `tf.function` would convert to a tensor, passed as it is."""

    def __init__(self, value: Any):
        self.value = value

    def __tf_tracing_type__(self, context: Any) -> ObjectTraceType:
        return ObjectTraceType(self.value, self)


# The place of a tensor in a template.
_TENSOR = object()


def _has_tensors(leaf: Any) -> bool:
    if isinstance(leaf, DistributedValues):
        return any(tf.is_tensor(value) for value in leaf.values)
    return tf.is_tensor(leaf)
