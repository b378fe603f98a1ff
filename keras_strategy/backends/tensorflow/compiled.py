"""One tf.function for each function that is run.

Running on several replicas eagerly is 20 to 40 times slower than in a tf.function.

A function may build layers when it is first traced. Replicas are traced one after the
other, so the first one alone finds them unbuilt, and may have taken another branch. So
such a trace is thrown away, as are those in which a tf.function makes variables.
"""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import tree
from tensorflow.python.eager.lift_to_graph import UnliftableError

from keras_strategy.backends.tensorflow.containers import Unchanged
from keras_strategy.backends.tensorflow.programs import Programs
from keras_strategy.backends.tensorflow.replica import Peers
from keras_strategy.backends.tensorflow.rows import mark, marks
from keras_strategy.rules.known_functions import (
    MANY_PROGRAMS,
    PROGRAMS,
    KnownFunctions,
    warn_of_many_programs,
)
from keras_strategy.values.distributed import DistributedValues


class CompiledRuns:
    """Runs functions compiled, and forgets them when their owners do.

    Args:
        call: Runs a function on every replica: `call(fn, args, kwargs)`.
        peers: The replicas.
    """

    def __init__(self, call: Callable[[Callable, tuple, dict], Any], peers: Peers):
        self._functions = KnownFunctions(lambda: _CompiledRun(call, peers))

    def __call__(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        run = self._functions.find(fn)
        traces = run.traces
        result = run(fn, args, kwargs)
        if run.traces > traces:
            self._functions.called(fn)
        return result


class _CompiledRun:
    """One function on every replica as a tf.function.

    A tf.function returns tensors alone, so a run's other outputs are kept aside at
    tracing, under a number that the tf.function returns as a key.

    Args:
        call: See `CompiledRuns`.
        peers: Likewise.

    Attributes:
        traces: How often the function was traced.
    """

    def __init__(self, call: Callable, peers: Peers):
        self._call = call
        self._peers = peers
        self._seeds = peers.seeds
        self._draws = False
        # What is remembered for a function or an object must not keep it alive, so
        # each call brings the function, which is traced where that is necessary.
        self._brought = threading.local()
        self.traces = 0
        self._warned = False
        self._start()

    def _start(self) -> None:
        templates: list[Any] = []

        def trace(args, kwargs, of_batch):
            mark(args, kwargs, of_batch)
            return self._trace(templates, args, kwargs)

        self._templates = templates
        self._programs = Programs(trace)

    def __call__(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        leaves = tree.flatten((args, kwargs))
        if any(map(isinstance, leaves, itertools.repeat(keras.Variable))):
            # They are variables in the function too, not what they hold now.
            args, kwargs = tree.map_structure(
                lambda x: Unchanged(x) if isinstance(x, keras.Variable) else x,
                (args, kwargs),
            )
        of_batch = marks(leaves)
        if not self._templates:
            self._build(fn, args, kwargs, of_batch)
        programs, templates = self._programs, self._templates
        if self._draws:
            self._seeds.renew()
        self._brought.fn = fn
        try:
            ((number, tensors),) = programs(args, kwargs, of_batch).items()
        except tf.errors.OpError as error:
            error.add_note(
                "TensorFlow writes variables in place: what the replicas had "
                "assigned before this error stays assigned. Load a checkpoint to go "
                "on from a state that fits together."
            )
            raise
        finally:
            del self._brought.fn
        if len(templates) > MANY_PROGRAMS and not self._warned:
            self._warned = True
            warn_of_many_programs(fn, len(templates))
        if len(templates) > PROGRAMS:
            self._start()  # nothing that was traced is forgotten
        template, tensors = templates[int(number)], iter(tensors)
        if template is _TENSOR:  # mostly: no structure of them
            return next(tensors)
        return tree.map_structure(
            lambda leaf: next(tensors) if leaf is _TENSOR else leaf, template
        )

    def _build(
        self, fn: Callable[..., Any], args: tuple, kwargs: dict, of_batch: Any
    ) -> None:
        """Traces the function, and forgets the trace if something was built in it."""
        made = self._peers.made
        self._brought.fn = fn
        try:
            self._programs.trace(args, kwargs, of_batch)
        except Exception as error:
            if self._peers.made == made:
                if isinstance(error, UnliftableError):
                    error.add_note(
                        "It is a `tf.Variable` that the function makes. Make it in the "
                        "strategy's scope, before `strategy.run`; or a "
                        "`keras.Variable`, which may be made in the first call."
                    )
                raise
        finally:
            del self._brought.fn
        if self._peers.made != made:
            self._start()

    def _trace(self, templates, args, kwargs):
        taken = self._seeds.taken
        args, kwargs = tree.map_structure(
            lambda x: x.it if isinstance(x, Unchanged) else x, (args, kwargs)
        )
        outputs = self._call(self._brought.fn, args, kwargs)
        self._draws |= self._seeds.taken > taken
        tensors = [leaf for leaf in tree.flatten(outputs) if _holds_tensors(leaf)]
        self.traces += 1
        templates.append(
            tree.map_structure(
                lambda leaf: _TENSOR if _holds_tensors(leaf) else leaf, outputs
            )
        )
        return {str(len(templates) - 1): tensors}


_TENSOR = object()


def _holds_tensors(leaf: Any) -> bool:
    if isinstance(leaf, DistributedValues):
        return any(tf.is_tensor(value) for value in leaf.values)
    return tf.is_tensor(leaf)
