"""Makes distributed datasets: which replica gets what of the user's data."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import tree

from keras_strategy.core import context
from keras_strategy.core.registry import get_engine
from keras_strategy.input.dataset import DistributedDataset, EvenParts, Parts
from keras_strategy.input.rounds import (
    agreed_rounds,
    is_own_rows,
    whole_batches,
    without_rows,
)
from keras_strategy.input.sources import (
    as_array,
    batches_of,
    has_fixed_shapes,
    is_tf_dataset,
    number_of_batches,
)
from keras_strategy.options.input import (
    InputContext,
    InputOptions,
    InputReplicationMode,
)
from keras_strategy.rules.row_weights import split_rows
from keras_strategy.rules.step import rows_of_arrays

if TYPE_CHECKING:
    from keras_strategy.core.strategy import Strategy

_BATCH_FIRST = (
    "The elements must be batches; make them of single rows first, with "
    "`dataset.batch(global_batch_size)` or the like."
)


def distribute(
    strategy: "Strategy", dataset: Any, options: InputOptions | None
) -> DistributedDataset:
    """See `Strategy.experimental_distribute_dataset`."""
    argument = "Argument `dataset`"
    _check(strategy, "experimental_distribute_dataset", options, dataset, argument)
    if options and (
        options.experimental_replication_mode is InputReplicationMode.PER_REPLICA
    ):
        raise NotImplementedError(
            "InputReplicationMode.PER_REPLICA is for "
            "`distribute_datasets_from_function`: a dataset of global batches is read "
            f"once for all replicas. Received: options={options!r}"
        )
    start = batches_of(dataset, argument)
    cluster = strategy.extended.cluster
    own_rows = cluster is not None and is_own_rows(dataset, options)
    native = None
    if cluster is not None and own_rows:
        own = start

        def start():
            return whole_batches(own(), strategy, cluster, argument)

    else:
        native = get_engine().distribute_natively(strategy, [dataset], True, options)
    replicas = strategy.num_replicas_in_sync
    local = strategy.extended.topology.local_replicas

    def parts() -> Iterator[Parts | EvenParts]:
        batches = start()
        return (_split(batch, replicas, local, argument) for batch in batches)

    result = native or DistributedDataset(strategy, parts)
    if not own_rows:
        result._global_batches = (
            dataset
            if is_tf_dataset(dataset)
            else GlobalBatches(start, number_of_batches(dataset))
        )
    elif keras.backend.backend() != "tensorflow":
        # There Keras reads in a thread of tf.data's, where rows could not travel in
        # step with the other workers.
        result._global_batches = GlobalBatches(start, None)
    return result


def distribute_from_function(
    strategy: "Strategy",
    dataset_fn: Callable[[InputContext], Any],
    options: InputOptions | None,
) -> DistributedDataset:
    """See `Strategy.distribute_datasets_from_function`."""
    if not callable(dataset_fn):
        raise TypeError(
            "Argument `dataset_fn` must be a function of an InputContext that returns "
            f"a dataset. Received: dataset_fn={dataset_fn!r} of type "
            f"{type(dataset_fn).__name__}"
        )
    _check(strategy, "distribute_datasets_from_function", options)
    replicas = strategy.num_replicas_in_sync
    cluster = strategy.extended.cluster
    local = strategy.extended.topology.local_replicas
    per_replica = options is not None and (
        options.experimental_replication_mode is InputReplicationMode.PER_REPLICA
    )
    if per_replica:
        pipelines, own = replicas, list(local)
    elif cluster is None:
        pipelines, own = 1, [0]
    else:
        pipelines, own = cluster.size, [cluster.rank]
    datasets = [dataset_fn(InputContext(pipelines, i, replicas)) for i in own]
    argument = "What `dataset_fn` returned"
    for dataset in datasets:
        _check(strategy, "distribute_datasets_from_function", None, dataset, argument)
    starts = [batches_of(dataset, argument) for dataset in datasets]
    native = get_engine().distribute_natively(strategy, datasets, False, options)
    partial = not all(map(has_fixed_shapes, datasets))

    def parts() -> Iterator[Parts]:
        iterators = [start() for start in starts]
        turns = iterators if per_replica else iterators * len(local)
        rounds = _rounds(turns, partial, argument)
        return rounds if cluster is None else agreed_rounds(rounds, cluster, partial)

    result = native or DistributedDataset(strategy, parts)
    if cluster is not None:
        return result  # no worker has the global batches
    counts = [number_of_batches(dataset) for dataset in datasets]
    known = [count for count in counts if count is not None]
    rounds = None
    if len(known) == len(counts) and per_replica:
        rounds = max(known) if partial else min(known)
    elif len(known) == len(counts):
        rounds = (known[0] + (replicas - 1 if partial else 0)) // replicas
    result._global_batches = GlobalBatches(lambda: map(_joined, parts()), rounds)
    return result


@dataclass
class GlobalBatches:
    """The batches of all replicas, for Keras's own loop.

    Attributes:
        start: Starts to read them.
        number: How many there are, None if that is not known.
    """

    start: Callable[[], Iterator[Any]]
    number: int | None


def for_keras(dataset: Any, strategy: "Strategy | None", method: str) -> Any:
    """What Keras's `fit` and its like read in the place of a distributed dataset.

    They split global batches themselves.

    Args:
        dataset: Any argument of `fit`, which is returned if it is not distributed.
        strategy: The strategy of the model, None for none.
        method: "fit" or the like.

    Returns:
        A `tf.data.Dataset` of global batches, or `GlobalBatches`.

    Raises:
        ValueError: If another strategy distributed the dataset.
    """
    cluster = None if strategy is None else strategy.extended.cluster
    if strategy is not None and cluster is not None and is_own_rows(dataset, None):
        dataset = distribute(strategy, dataset, None)
    if not isinstance(dataset, DistributedDataset):
        return dataset
    if dataset._strategy is not (strategy or context.default_strategy()):
        raise ValueError(
            f"`{method}` was given a dataset that {dataset._strategy!r} distributed, "
            f"and the model belongs to {strategy or 'no strategy'!r}. Give `{method}` "
            "the dataset as it was before, or make the model in the scope of that "
            "strategy."
        )
    if dataset._global_batches is None:
        raise ValueError(
            f"`{method}` needs the same global batches on every worker, and of this "
            "dataset each worker has its own rows alone. Give it the dataset that all "
            f"workers share, or write a loop of your own. Received: {dataset!r}"
        )
    return dataset._global_batches


def _check(
    strategy: "Strategy",
    method: str,
    options: Any,
    dataset: Any = None,
    argument: str = "",
) -> None:
    context.require_cross_replica(strategy, method)
    if options is not None and not isinstance(options, InputOptions):
        raise TypeError(
            "Argument `options` must be an InputOptions or None. Received: "
            f"options={options!r} of type {type(options).__name__}"
        )
    if isinstance(dataset, DistributedDataset):
        raise ValueError(
            f"{argument} has been distributed already. Iterate over it as it is. "
            f"Received: {dataset!r}"
        )


def _split(batch: Any, replicas: int, local: range, argument: str) -> Parts | EvenParts:
    """The rows of a global batch that each replica of this worker gets."""
    arrays = [as_array(leaf, argument) for leaf in tree.flatten(batch)]
    try:
        rows = rows_of_arrays(arrays)
    except ValueError as error:
        raise ValueError(f"{argument}: {error} {_BATCH_FIRST}") from None
    if rows % replicas == 0 and len(local) == replicas:
        return EvenParts(batch, arrays, replicas)
    batch = tree.pack_sequence_as(batch, arrays)
    bounds = split_rows(rows, replicas)
    parts = Parts(
        tree.map_structure(
            lambda leaf, b=begin, e=end: None if leaf is None else leaf[b:e], batch
        )
        for begin, end in bounds[local.start : local.stop]
    )
    # All workers split the same batches.
    parts.alike = len({end - begin for begin, end in bounds}) == 1
    return parts


def _rounds(
    iterators: Sequence[Iterator[Any]], partial: bool, argument: str
) -> Iterator[Parts]:
    """The elements that the replicas take in turn.

    In the last round there may be too few. The replicas that come last then get the
    element of the first without its rows; tf.distribute drops such a round where all
    elements have one shape (`partial` is False), and so does this where an element
    has no rows to leave out.
    """
    missing = object()
    while True:
        elements = [next(iterator, missing) for iterator in iterators]
        there = [element for element in elements if element is not missing]
        if not there:
            return
        there = [
            tree.map_structure(lambda leaf: as_array(leaf, argument), element)
            for element in there
        ]
        for element in there[1:]:
            _require_same_structure(there[0], element, argument)
        if len(there) < len(elements):
            arrays = [leaf for leaf in tree.flatten(there[0]) if leaf is not None]
            if not partial or any(len(leaf.shape) == 0 for leaf in arrays):
                return
        empty = tree.map_structure(without_rows, there[0])
        real = iter(there)
        yield Parts(empty if e is missing else next(real) for e in elements)


def _joined(parts: Parts) -> Any:
    """The global batch of all replicas' parts."""

    def join(*leaves):
        if leaves[0] is None:
            return None
        if isinstance(leaves[0], np.ndarray):
            return np.concatenate(leaves)
        return keras.ops.concatenate(leaves)

    return tree.map_structure(join, *parts)


def _require_same_structure(first: Any, other: Any, argument: str) -> None:
    try:
        tree.assert_same_structure(first, other)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{argument} must give elements of one structure. Received elements of "
            f"different ones: {error}"
        ) from error
