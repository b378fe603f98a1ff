"""Keras's loop on several workers: batches that all have, and steps that have names.

Keras lets a tf.function take the batches out of the data. A worker that has none left
would leave the others waiting there, so here they are taken in Python, one for each
call, after all workers have said that they have one.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from keras import tree

from keras_strategy.errors import WorkerInputError
from keras_strategy.input.agreement import AgreedBatches
from keras_strategy.rules.step import rows_of
from keras_strategy.workers.cluster import Cluster

if TYPE_CHECKING:
    from keras_strategy.backends.tensorflow.group import TensorFlowGroup

_NAMES = {"train": "fit", "test": "evaluate", "predict": "predict"}


class WorkerBatches:
    """The batches of a dataset while all workers have one.

    Args:
        dataset: A `tf.data.Dataset` of global batches.
        cluster: The workers.
        counts: See `AgreedBatches`.
    """

    def __init__(self, dataset: Any, cluster: Cluster, counts: list | None):
        self._agreed = AgreedBatches(_Batches(dataset), cluster, counts)

    def __iter__(self) -> "AgreedIterator":
        return AgreedIterator(self._agreed)


class AgreedIterator:
    """Reads batches that all workers have."""

    def __init__(self, batches: Iterable[Any]):
        self._batches = iter(batches)

    def __iter__(self) -> "AgreedIterator":
        return self

    def __next__(self) -> Any:
        return next(self._batches)


class _Batches:
    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        for batch in self._dataset:
            # So tf.data hands out what an element leaves out.
            yield tree.map_structure(
                lambda leaf: (
                    None if isinstance(leaf, tf.experimental.Optional) else leaf
                ),
                batch,
            )


def steps_of_workers(
    function: Callable[[Any], Any],
    group: "TensorFlowGroup",
    cluster: Cluster,
    model: keras.Model,
    kind: str,
) -> Callable[[Any], Any]:
    """Makes Keras's function of an iterator one that all workers call alike.

    Args:
        function: What `Model.make_train_function` or its like has made.
        group: The replicas.
        cluster: The workers.
        model: The model.
        kind: "train" or "test".
    """

    def of_workers(iterator):
        if not isinstance(iterator, AgreedIterator):
            # The batch of `train_on_batch` and its like.
            iterator = AgreedBatches(iterator, cluster)
        outputs = None
        batches = iter(iterator)
        first = next(batches)  # the end of the data is the end of the epoch
        others = itertools.islice(batches, model.steps_per_execution - 1)
        for batch in itertools.chain([first], others):
            with group.calling(_NAMES[kind]):
                outputs = function(iter([batch]))
        return outputs

    return of_workers


def predictions_of_workers(
    function: Callable[[Any], Any], group: "TensorFlowGroup", cluster: Cluster
) -> Callable[[Any], Any]:
    """Makes Keras's function that predicts batches one that all workers call alike.

    Args:
        function: What `Model.make_predict_function` has made, of a list of batches.
        group: The replicas.
        cluster: The workers.
    """

    def of_workers(batches):
        # Also those of `predict_on_batch`, to which nobody has agreed yet.
        rows = [rows_of(batch) for batch in batches]
        told = cluster.agree("the rows to predict", rows)
        if any(other != rows for other in told):
            raise WorkerInputError(
                "All workers must be given the same batches: each predicts its own "
                f"rows of them. Received batches of these numbers of rows: "
                f"{cluster.listed(told)}."
            )
        with group.calling(_NAMES["predict"]):
            return function(batches)

    return of_workers
