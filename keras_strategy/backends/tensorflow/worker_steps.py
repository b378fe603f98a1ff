"""Keras's loop on several workers: batches that all have, and steps that have names.

Keras lets a tf.function take the batches out of the data. A worker that has none left
would leave the others waiting there, so here they are taken in Python, one for each
call, after all workers have said that they have one.
"""

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from keras import tree

from keras_strategy.hooks.layers import all_layers, seed_generators
from keras_strategy.input.own_rows import OwnRows

if TYPE_CHECKING:
    from keras_strategy.backends.tensorflow.group import TensorFlowGroup

logger = logging.getLogger("keras_strategy")

_DRAWS = (
    "The model '%s' draws random numbers, and nobody knows the length of its data. "
    "There Keras's loop on TensorFlow draws once more at the end of each epoch, which "
    "several workers do not: in the epochs that follow they draw others than one "
    "device. Give `steps_per_epoch`, or a `tf.data.Dataset` of known length (`apply("
    "tf.data.experimental.assert_cardinality(batches))`)."
)
_NAMES = {"train": "fit", "test": "evaluate", "predict": "predict"}


class WorkerBatches:
    """Batches for all workers, which take each together.

    Args:
        batches: `AgreedBatches` or `JoinedBatches`.
    """

    def __init__(self, batches: Iterable[Any]):
        self._batches = batches

    def __iter__(self) -> "AgreedIterator":
        return AgreedIterator(self._batches)


class AgreedIterator:
    """Reads batches that the workers take together."""

    def __init__(self, batches: Iterable[Any]):
        self._batches = iter(batches)

    def __iter__(self) -> "AgreedIterator":
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        return TensorsOfOwnRows(**vars(batch)) if isinstance(batch, OwnRows) else batch


class TensorsOfOwnRows(OwnRows):
    """A worker's rows of a batch, which a tf.function takes."""

    def __tf_flatten__(self) -> Any:
        numbers = tf.nest.map_structure(
            lambda number: tf.convert_to_tensor(number, tf.int32),
            (self.bounds, self.total),
        )
        leaves = [leaf for leaf in tree.flatten(self.batch) if leaf is not None]
        # The counts themselves would be traced anew.
        joined = self.counts is not None
        return (_Layout(self.batch), joined), (leaves, *numbers)

    @classmethod
    def __tf_unflatten__(cls, metadata: Any, components: Any) -> Any:
        (layout, joined), (leaves, bounds, total) = metadata, components
        counts = () if joined else None
        return cls(layout.with_leaves(leaves), bounds, total, counts=counts)


class _Layout:
    """What a batch is made of, beside the sizes of its arrays.

    TensorFlow traces anew for another one. What it would do of two by itself, to look
    for a type that both have, fails for objects that are flattened in our way.
    """

    def __init__(self, batch: Any):
        self._present = tree.map_structure(lambda leaf: leaf is not None, batch)
        kinds = tree.map_structure(
            lambda leaf: (
                leaf is not None and (tf.as_dtype(leaf.dtype).name, len(leaf.shape))
            ),
            batch,
        )
        self._text = repr(kinds)

    def with_leaves(self, leaves: Iterable[Any]) -> Any:
        """A batch of this layout."""
        given = iter(leaves)
        return tree.map_structure(
            lambda present: next(given) if present else None, self._present
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Layout) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)


class Elements:
    """The elements of a `tf.data.Dataset`, with None for what they leave out.

    Or a worker's rows of batches. Keras starts to read them when it takes the first:
    to start may draw random numbers.
    """

    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        for batch in self._dataset:
            if isinstance(batch, OwnRows):
                # As Keras's own datasets have it.
                yield replace(batch, batch=tree.lists_to_tuples(batch.batch))
                continue
            yield tree.map_structure(
                lambda leaf: (
                    None if isinstance(leaf, tf.experimental.Optional) else leaf
                ),
                batch,
            )


def steps_of_workers(
    function: Callable[[Any], Any],
    group: "TensorFlowGroup",
    model: keras.Model,
    kind: str,
) -> Callable[[Any], Any]:
    """Makes Keras's function of an iterator one that all workers call alike.

    Args:
        function: What `Model.make_train_function` or its like has made.
        group: The replicas.
        model: The model.
        kind: "train" or "test".
    """
    told = False

    def of_workers(iterator):
        nonlocal told
        outputs = None
        batches = iter(iterator)
        try:
            first = next(batches)
        except StopIteration:  # the end of the data is the end of the epoch
            if kind == "train" and not told:
                told = True
                _tell_of_draws(model, group)
            raise
        others = itertools.islice(batches, model.steps_per_execution - 1)
        for batch in itertools.chain([first], others):
            with group.calling(_NAMES[kind]):
                outputs = function(iter([batch]))
        return outputs

    return of_workers


def _tell_of_draws(model: keras.Model, group: "TensorFlowGroup") -> None:
    """Where nobody knew the end, Keras's step has begun to draw before it finds it.

    One that is not compiled, or takes several batches, asks for a batch first.
    """
    if model.run_eagerly or model.steps_per_execution > 1:
        return
    draws = seed_generators(all_layers(model))
    if draws and group.workers is not None and group.workers.cluster.is_chief:
        logger.warning(_DRAWS, model.name)


def predictions_of_workers(
    function: Callable[[Any], Any], group: "TensorFlowGroup"
) -> Callable[[Any], Any]:
    """Makes Keras's function that predicts batches one that all workers call alike.

    Args:
        function: What `Model.make_predict_function` has made, of a list of batches.
        group: The replicas.
    """

    def of_workers(batches):
        with group.calling(_NAMES["predict"]):
            return function(batches)

    return of_workers
