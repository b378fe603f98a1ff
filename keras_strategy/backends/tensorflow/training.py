"""fit, evaluate and predict: Keras's own loop over `strategy.run` of a step.

Keras's TensorFlow trainer calls a native strategy to distribute the data and to run
each step. `TrainingStrategy` stands in for that strategy. It leaves the data as it is,
splits every global batch by rows inside the step's tf.function, runs the step with
the replicas' row weights, and merges the outputs before Keras sees them.

On several workers, Keras's loop cannot take batches inside a tf.function: a worker
without further data would leave the others waiting there. So batches are taken in
Python, one for each call, after all workers have reported that they have one.
"""

import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from keras_strategy.audit.policy import RowPolicy, take_own_rows, with_all_rows
from keras_strategy.backends.tensorflow.collectives import gather_over_workers
from keras_strategy.backends.tensorflow.compile_cache import require
from keras_strategy.backends.tensorflow.group import TensorFlowGroup
from keras_strategy.backends.tensorflow.tensors import (
    common_rows,
    rows_of_tensor,
    slice_rows,
)
from keras_strategy.core.protocols import AuditAdapter, Strategy
from keras_strategy.core.step_state import LocalRows, RowRange
from keras_strategy.keras_patches.internals import stored_value
from keras_strategy.keras_patches.layers import all_layers, seed_generators
from keras_strategy.training import train_step
from keras_strategy.training.batch_function import (
    BatchFunction,
    LocalBatch,
    arrays_of,
)
from keras_strategy.training.row_weights import kinds_that_run_whole
from keras_strategy.values import DistributedValues, PerReplica

logger = logging.getLogger("keras_strategy")


class TrainingStrategy:
    """Stand-in for the native strategy of a model in Keras's trainer."""

    def __init__(self, strategy: Strategy, model: keras.Model):
        self._strategy, self._model = strategy, model
        self._native = cast(TensorFlowGroup, strategy.extended.group).native

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def experimental_distribute_dataset(self, dataset: Any) -> Any:
        return dataset

    def run(self, step: Callable[[Any], Any], args: tuple = ()) -> Any:
        """Run a step on a global batch; return merged logs or all rows' predictions."""
        (batch,) = args
        strategy, model = self._strategy, self._model
        kinds = {model.train_step: "train", model.test_step: "test"}
        kind = kinds.get(step, "predict")
        if kind in kinds_that_run_whole(model):
            rows = _to_tensors(arrays_of(batch))
            return train_step.run_whole(strategy, step, (rows,), {})
        layers = functools.partial(all_layers, model)
        function = TensorFlowBatchFunction(model, kind, strategy, step, layers)
        return function.run_batch(batch)


class TensorFlowBatchFunction(BatchFunction):
    """The part of a program of Keras's loop that runs a step on the replicas."""

    _count_rows: Any = staticmethod(common_rows)
    _require: Any = staticmethod(require)

    def _split(self, batch: Any) -> tuple[Any, list[Any]]:
        leaves = [leaf for leaf in tree.flatten(arrays_of(batch)) if leaf is not None]
        if not leaves:
            raise ValueError("A batch must hold at least one array. Received none.")
        if isinstance(leaves[0], tf.distribute.DistributedValues):
            return self._unwrap(batch, leaves[0].values)
        if isinstance(batch, LocalRows):
            return super()._split(replace(batch, batch=_to_tensors(batch.batch)))
        return super()._split(_to_tensors(batch))

    def _unwrap(
        self, batch: Any, first_leaf: Sequence[Any]
    ) -> tuple[PerReplica, list[Any]]:
        """Return native distributed values, which are split already, by replica."""
        counts = list(map(rows_of_tensor, first_leaf))
        total, workers = tf.add_n(counts), self._group.workers
        if workers is not None:
            total = workers.sum("the rows of a batch", total)
        local_batches = []
        for i, count in enumerate(counts):
            data = tree.map_structure(
                lambda leaf, i=i: None if leaf is None else leaf.values[i], batch
            )
            rows = None if workers else RowRange(sum(counts[:i]), count, total)
            local_batches.append(LocalBatch(data, count / total, rows))
        return PerReplica(local_batches), [local.weight for local in local_batches]

    def _slice(self, replica: int, begin: Any, end: Any, array: Any) -> Any:
        return slice_rows(array, (begin, end))

    def _run_replicas(self, local_batches: Any) -> Any:
        return self._group.call(self._step, (local_batches,), {})

    def _merge_logs(self, logs: Any, weights: list[Any]) -> Any:
        if self._group.workers is None or not self._returns_metrics:
            return super()._merge_logs(logs, weights)
        return train_step.merge_worker_metrics(self._model, self._group)

    def _join_rows(
        self, value: DistributedValues, weights: list[Any], is_global: bool
    ) -> Any:
        parts = [  # without stand-in rows
            slice_rows(part, (0, tf.where(weight > 0, rows_of_tensor(part), 0)))
            for part, weight in zip(value.values, weights, strict=True)
        ]
        is_sparse = isinstance(parts[0], tf.SparseTensor)
        rows = tf.sparse.concat(0, parts) if is_sparse else tf.concat(parts, 0)
        workers = self._group.workers
        if workers is None or not is_global:
            return rows
        return gather_over_workers(workers, "the predictions", rows)


def _to_tensors(data: Any) -> Any:
    def convert(x):
        if isinstance(x, tf.distribute.DistributedValues):
            return tf.concat(x.values, axis=0)
        return x if x is None or tf.is_tensor(x) else tf.convert_to_tensor(x)

    return tree.map_structure(convert, data)


_RANDOM_WARNING = (
    "The model '%s' draws random numbers, and its data has an unknown length. With "
    "such data, Keras's loop on TensorFlow draws once more at the end of each epoch; "
    "with several workers it does not. So later epochs draw different numbers than a "
    "single device. Pass `steps_per_epoch`, or a `tf.data.Dataset` of known length "
    "(`apply(tf.data.experimental.assert_cardinality(batches))`)."
)


_LOOPS = {"train": "fit", "test": "evaluate", "predict": "predict"}


class MappedBatches:
    """Batches to each of which a function is applied."""

    # Lazy, because the start of an iteration may draw random numbers.

    def __init__(self, fn: Callable[[Any], Any], batches: Iterable[Any]):
        self._fn, self._batches = fn, batches

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            yield self._fn(batch)


def remove_optionals(batch: Any) -> Any:
    """Return a batch of a `tf.data.Dataset` with None for absent leaves."""
    if isinstance(batch, LocalRows):
        # As Keras's own datasets do.
        return replace(batch, batch=tree.lists_to_tuples(batch.batch))
    return tree.map_structure(
        lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, batch
    )


def make_traceable(batch: Any) -> Any:
    return TensorLocalRows(**vars(batch)) if isinstance(batch, LocalRows) else batch


class TensorLocalRows(LocalRows):
    """A worker's rows of a batch, which a tf.function takes."""

    def __tf_flatten__(self) -> Any:
        numbers = tf.nest.map_structure(
            lambda number: tf.convert_to_tensor(number, tf.int32),
            (self.bounds, self.global_rows),
        )
        leaves = [leaf for leaf in tree.flatten(self.batch) if leaf is not None]

        # TensorFlow retraces for another structure, dtype or rank. Its own search for a
        # common type of two batches fails for objects with `__tf_flatten__`.
        def describe(leaf):
            if leaf is None:
                return None
            return f"{tf.as_dtype(leaf.dtype).name} {len(leaf.shape)}"

        # The row counts themselves would cause retracing.
        has_worker_rows = self.worker_rows is not None
        layout = tree.map_structure(describe, self.batch)
        return (layout, has_worker_rows), (leaves, *numbers)

    @classmethod
    def __tf_unflatten__(cls, metadata: Any, components: Any) -> Any:
        (layout, has_worker_rows), (leaves, bounds, global_rows) = metadata, components
        iterator = iter(leaves)
        batch = tree.map_structure(
            lambda kind: None if kind is None else next(iterator), layout
        )
        worker_rows = () if has_worker_rows else None
        return cls(batch, bounds, global_rows, worker_rows=worker_rows)


def audit_first_call(
    function: Callable[[Any], Any],
    strategy: Strategy,
    model: keras.Model,
    kind: str,
    scope: Callable[[], Any],
) -> Callable[[Any], Any]:
    """Wrap a function of Keras's loop in the audit of its first step."""
    # The audit reads the batches of the first call, and the function gets them again.
    policy = RowPolicy(model, kind, strategy, scope)
    attribute, is_traced = f"{kind}_function", False

    def run_steps(batches):
        nonlocal is_traced
        is_due = policy.is_due()
        if is_due and kind == "predict":  # which gets a list
            policy.audit(remove_optionals(batches[0]))
        elif is_due:
            first = list(itertools.islice(batches, model.steps_per_execution))
            if first:
                policy.audit(remove_optionals(first[0]))
            batches = _make_iterator(first, batches)
        if policy.has_changed and is_traced:
            getattr(model, f"make_{kind}_function")(force=True)
            return getattr(model, attribute)(batches)
        if policy.is_done and getattr(model, attribute) is this():
            setattr(model, attribute, function)  # later steps need no wrapper
        is_traced = True
        return function(batches)

    def ask_again():
        if getattr(model, attribute) is function:
            setattr(model, attribute, run_steps)

    policy.ask_again = ask_again
    this = weakref.ref(run_steps)
    return run_steps


def _make_iterator(batches: list[Any], read_from: Any) -> Any:
    """Return an iterator of batches for which a program need not be traced again."""
    try:
        spec, make = read_from.element_spec, tf.data.Dataset.from_generator
        return iter(make(lambda: iter(batches), output_signature=spec))
    except (AttributeError, TypeError, ValueError):
        return iter(batches)  # for example a structure with None


def sync_workers(
    function: Callable[[Any], Any],
    group: TensorFlowGroup,
    model: keras.Model,
    kind: str,
) -> Callable[[Any], Any]:
    """Wrap the function that Keras makes for `fit`, `evaluate` or `predict`."""
    is_chief = group.workers is not None and group.workers.cluster.is_chief
    has_warned = False

    def prepare(batch):
        if kind not in kinds_that_run_whole(model):
            return batch
        return make_traceable(with_all_rows(batch, group.strategy))

    def predict(batches):
        with group.collective_scope(_LOOPS[kind]):
            outputs = function([prepare(batch) for batch in batches])
        if kind not in kinds_that_run_whole(model):
            return outputs
        return take_own_rows(outputs, batches[0], group.strategy)

    def run_steps(iterator):
        nonlocal has_warned
        outputs = None
        batches = iter(iterator)
        try:
            first = next(batches)
        except StopIteration:  # the end of the data is the end of the epoch
            # Eager steps and steps of several batches take a batch before they draw.
            has_drawn = not model.run_eagerly and model.steps_per_execution == 1
            if kind == "train" and has_drawn and not has_warned:
                has_warned = True
                if is_chief and seed_generators(all_layers(model)):
                    logger.warning(_RANDOM_WARNING, model.name)
            raise
        others = itertools.islice(batches, model.steps_per_execution - 1)
        for batch in itertools.chain([first], others):
            with group.collective_scope(_LOOPS[kind]):
                outputs = function(iter([prepare(batch)]))
        return outputs

    return predict if kind == "predict" else run_steps


def make_step_function(
    strategy: Strategy, model: keras.Model, kind: str, make: Callable[[], Any]
) -> Any:
    """Return a function of Keras's loop, from what `make` returns."""
    # On several workers it takes only batches that all workers have.
    if strategy.num_replicas_in_sync == 1:
        return make()
    if model.jit_compile:
        logger.warning(
            "jit_compile=True is not used for the model '%s': XLA cannot compile a "
            "step of several devices on TensorFlow. The results are the same.",
            model.name,
        )
        model.jit_compile = False
    function = make()
    group: Any = strategy.extended.group
    if strategy.extended.cluster is not None:
        function = sync_workers(function, group, model, kind)
    scope = functools.partial(group.collective_scope, f"the audit of `{kind}_step`")
    return audit_first_call(function, strategy, model, kind, scope)


class StepAccess(AuditAdapter):
    """Access to the backend's state and a model's steps, for `keras_strategy.audit`."""

    def first_rows(self, x: Any, rows: int) -> Any:
        if not tf.is_tensor(x):
            return x[:rows]
        return slice_rows(x, (0, tf.minimum(rows, rows_of_tensor(x))))

    def host_copy(self, x: Any) -> np.ndarray | None:
        if isinstance(x, tf.RaggedTensor):
            x = x.to_tensor()
        elif isinstance(x, tf.SparseTensor):
            x = tf.sparse.to_dense(x)
        elif isinstance(x, tf.IndexedSlices | tf.Variable):
            x = tf.convert_to_tensor(x)
        is_eager = isinstance(x, tf.Tensor) and hasattr(x, "numpy")
        return np.array(x.numpy()) if is_eager else None

    def tensor_restorer(self, x: Any) -> Callable[[], None] | None:
        if not isinstance(x, tf.Variable):
            return None
        value = tf.identity(x)
        return lambda: x.assign(value)

    def module_tensors(self, x: Any) -> Sequence[tf.Variable]:
        if isinstance(x, tf.random.Generator):
            return (x.state,)
        return x.variables if isinstance(x, tf.Module) else ()

    def stored_tensors(self, variable: Any) -> Sequence[Any]:
        value = stored_value(variable)
        return (value, *getattr(value, "values", ()))

    def step_functions(
        self, model: keras.Model, kind: str, strategy: Any
    ) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        step = getattr(model, f"{kind}_step")
        layers = functools.partial(all_layers, model)
        function = TensorFlowBatchFunction(model, kind, strategy, step, layers)

        def step_on_replicas(batch):
            # TensorFlow warns of the costs of eager steps.
            logger = tf.get_logger()
            logger.addFilter(_discard)
            try:
                return function.run_batch(batch)
            finally:
                logger.removeFilter(_discard)

        return step_on_replicas, step


def _discard(record: Any) -> bool:
    return False
