"""One tf.function for each function that is run.

Running on several replicas eagerly is 20 to 40 times slower than in a tf.function.
"""

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras import tree

from keras_strategy.values.distributed import DistributedValues


class CompiledRuns:
    """Runs functions compiled, and forgets them when their owners do.

    Args:
        call: Runs a function on every replica: `call(fn, args, kwargs)`.
    """

    def __init__(self, call: Callable[[Callable, tuple, dict], Any]):
        self._call = call
        # id of a function, or of a method's object -> (weak reference, runs)
        self._runs: dict[int, tuple[Any, dict[Any, _CompiledRun]]] = {}

    def __call__(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        # A bound method is a new object each time; its function and object are not.
        owner = getattr(fn, "__self__", None)
        function = getattr(fn, "__func__", None)
        if owner is None or function is None:
            owner, function = fn, None
        key = id(owner)
        if key not in self._runs:
            try:
                reference = weakref.ref(owner, lambda _: self._runs.pop(key, None))
            except TypeError:  # what cannot be forgotten is not remembered
                return self._call(fn, args, kwargs)
            self._runs[key] = (reference, {})
        reference, runs = self._runs[key]
        if function not in runs:
            runs[function] = _CompiledRun(self._call, reference, function)
        return runs[function](args, kwargs)


class _CompiledRun:
    """One function on every replica as a tf.function.

    A tf.function returns tensors alone, so a run's other outputs are kept aside at
    tracing, under a number that the tf.function returns as a key.

    Args:
        call: See `CompiledRuns`.
        owner: Weak reference to the function, or to the object of a method: what is
            remembered for an object must not keep it alive.
        function: The function of a method, or None.
    """

    def __init__(self, call: Callable, owner: weakref.ref, function: Any):
        self._call = call
        self._owner = owner
        self._method = function
        self._templates: list[Any] = []
        self._function = tf.function(
            self._trace, autograph=False, reduce_retracing=True
        )

    def __call__(self, args: tuple, kwargs: dict) -> Any:
        try:
            ((number, tensors),) = self._function(args, kwargs).items()
        except tf.errors.OpError as error:
            error.add_note(
                "TensorFlow writes variables in place: what the replicas had "
                "assigned before this error stays assigned. Load a checkpoint to go "
                "on from a state that fits together."
            )
            raise
        tensors = iter(tensors)
        return tree.map_structure(
            lambda leaf: next(tensors) if leaf is _TENSOR else leaf,
            self._templates[int(number)],
        )

    def _trace(self, args, kwargs):
        fn = self._owner()
        if self._method is not None:
            fn = self._method.__get__(fn)
        outputs = self._call(fn, args, kwargs)
        tensors = [leaf for leaf in tree.flatten(outputs) if _holds_tensors(leaf)]
        self._templates.append(
            tree.map_structure(
                lambda leaf: _TENSOR if _holds_tensors(leaf) else leaf, outputs
            )
        )
        return {str(len(self._templates) - 1): tensors}


_TENSOR = object()


def _holds_tensors(leaf: Any) -> bool:
    if isinstance(leaf, DistributedValues):
        return any(tf.is_tensor(value) for value in leaf.values)
    return tf.is_tensor(leaf)
