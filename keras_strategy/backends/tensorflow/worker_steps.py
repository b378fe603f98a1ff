"""Agreed batches and named steps for Keras's loop on several workers."""

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from keras import tree

from keras_strategy.hooks.layers import all_layers, seed_generators
from keras_strategy.input.own_rows import LocalRows

if TYPE_CHECKING:
    from keras_strategy.backends.tensorflow.group import TensorFlowGroup

logger = logging.getLogger("keras_strategy")

_RANDOM_WARNING = (
    "The model '%s' draws random numbers, and its data has an unknown length. With "
    "such data, Keras's loop on TensorFlow draws once more at the end of each epoch; "
    "with several workers it does not. So later epochs draw different numbers than a "
    "single device. Pass `steps_per_epoch`, or a `tf.data.Dataset` of known length "
    "(`apply(tf.data.experimental.assert_cardinality(batches))`)."
)
_NAMES = {"train": "fit", "test": "evaluate", "predict": "predict"}


class WorkerBatches:
    """Batches that all workers take together, as structures that a tf.function takes.

    Args:
        batches: `SynchronizedBatches` or `PerWorkerBatches`.
    """

    def __init__(self, batches: Iterable[Any]):
        self._batches = batches

    def __iter__(self) -> "WorkerIterator":
        return WorkerIterator(self._batches)


class WorkerIterator:
    """Iterator of `WorkerBatches`."""

    def __init__(self, batches: Iterable[Any]):
        self._batches = iter(batches)

    def __iter__(self) -> "WorkerIterator":
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        return TensorLocalRows(**vars(batch)) if isinstance(batch, LocalRows) else batch


class TensorLocalRows(LocalRows):
    """A worker's rows of a batch, which a tf.function takes."""

    def __tf_flatten__(self) -> Any:
        numbers = tf.nest.map_structure(
            lambda number: tf.convert_to_tensor(number, tf.int32),
            (self.bounds, self.global_rows),
        )
        leaves = [leaf for leaf in tree.flatten(self.batch) if leaf is not None]
        # The counts themselves would cause retracing.
        has_counts = self.worker_rows is not None
        return (_BatchLayout(self.batch), has_counts), (leaves, *numbers)

    @classmethod
    def __tf_unflatten__(cls, metadata: Any, components: Any) -> Any:
        (layout, has_counts), (leaves, bounds, total) = metadata, components
        counts = () if has_counts else None
        return cls(layout.with_leaves(leaves), bounds, total, counts=counts)


class _BatchLayout:
    """The structure of a batch without the sizes of its arrays.

    TensorFlow retraces for a different layout. Its own search for a common type of two
    batches fails for objects with `__tf_flatten__`.
    """

    def __init__(self, batch: Any):
        self._is_present = tree.map_structure(lambda leaf: leaf is not None, batch)
        kinds = tree.map_structure(
            lambda leaf: (
                leaf is not None and (tf.as_dtype(leaf.dtype).name, len(leaf.shape))
            ),
            batch,
        )
        self._text = repr(kinds)

    def with_leaves(self, leaves: Iterable[Any]) -> Any:
        """Return a batch of this layout."""
        iterator = iter(leaves)
        return tree.map_structure(
            lambda is_present: next(iterator) if is_present else None, self._is_present
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BatchLayout) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)


class DatasetElements:
    """Elements of a `tf.data.Dataset` or local rows, with None for absent leaves.

    Iteration starts when Keras takes the first element, because it may draw random
    numbers.
    """

    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        for batch in self._dataset:
            if isinstance(batch, LocalRows):
                # As Keras's own datasets do.
                yield replace(batch, batch=tree.lists_to_tuples(batch.batch))
                continue
            yield tree.map_structure(
                lambda leaf: (
                    None if isinstance(leaf, tf.experimental.Optional) else leaf
                ),
                batch,
            )


def sync_worker_steps(
    function: Callable[[Any], Any],
    group: "TensorFlowGroup",
    model: keras.Model,
    kind: str,
) -> Callable[[Any], Any]:
    """Wrap Keras's function of an iterator, so that all workers call it alike.

    Args:
        function: The result of `Model.make_train_function` or `make_test_function`.
        group: The replicas.
        model: The model.
        kind: "train" or "test".
    """
    has_warned = False

    def run_steps(iterator):
        nonlocal has_warned
        outputs = None
        batches = iter(iterator)
        try:
            first = next(batches)
        except StopIteration:  # the end of the data is the end of the epoch
            if kind == "train" and not has_warned:
                has_warned = True
                _warn_of_random_numbers(model, group)
            raise
        others = itertools.islice(batches, model.steps_per_execution - 1)
        for batch in itertools.chain([first], others):
            with group.calling(_NAMES[kind]):
                outputs = function(iter([batch]))
        return outputs

    return run_steps


def _warn_of_random_numbers(model: keras.Model, group: "TensorFlowGroup") -> None:
    """Warn if Keras's compiled step draws before it finds the end of the data.

    Eager steps and steps of several batches take a batch first.
    """
    if model.run_eagerly or model.steps_per_execution > 1:
        return
    draws = seed_generators(all_layers(model))
    if draws and group.workers is not None and group.workers.cluster.is_chief:
        logger.warning(_RANDOM_WARNING, model.name)


def sync_worker_predictions(
    function: Callable[[Any], Any], group: "TensorFlowGroup"
) -> Callable[[Any], Any]:
    """Wrap the result of `make_predict_function`, so that all workers call it alike."""

    def predict(batches):
        with group.calling(_NAMES["predict"]):
            return function(batches)

    return predict
