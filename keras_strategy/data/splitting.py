"""How many batches are read before they are asked for, and how far they get.

Makes distributed datasets: which replica gets what of the user's data.

The predictions of all workers' rows, where each reads rows of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import tree

from keras_strategy.cluster.membership import Cluster
from keras_strategy.core import context
from keras_strategy.core.registry import get_engine
from keras_strategy.core.step_state import BatchRows
from keras_strategy.data import worker_batches
from keras_strategy.data.dataset_state import SourceStates, has_state
from keras_strategy.data.distributed_dataset import DistributedDataset
from keras_strategy.data.indexed_dataset import IndexedDataset, local_rows_start
from keras_strategy.data.local_rows import (
    EvenParts,
    LocalRows,
    ReplicaParts,
    local_bounds_fn,
)
from keras_strategy.data.prefetch import Prefetcher, copy_batch
from keras_strategy.data.sharding_policy import (
    is_per_worker_policy,
    resolve_policy,
    shard_for_worker,
)
from keras_strategy.data.sources import (
    OneShotStart,
    as_array,
    batches_of,
    has_fixed_shapes,
    is_tf_dataset,
    number_of_batches,
)
from keras_strategy.data.worker_batches import assemble_rounds, synchronize_rounds
from keras_strategy.errors import WorkerInputError
from keras_strategy.options import InputContext, InputOptions, InputReplicationMode
from keras_strategy.training.ownership import strategy_of_model
from keras_strategy.training.row_weights import split_rows
from keras_strategy.training.train_step import count_array_rows

if TYPE_CHECKING:
    from keras_strategy.core.protocols import Strategy


def prefetch_depth(dataset: Any, options: InputOptions | None) -> int:
    """How many batches of a dataset are read before they are asked for.

    An `IndexedDataset` says it, whose rows are the same whenever they are read. Of what
    is read by Python code of which nothing is known, none unless options say so. What
    is not counted here reads ahead by itself: `tf.data`, and loaders with threads or
    processes of their own. And arrays need not be read.

    Args:
        dataset: The dataset.
        options: What was asked for.
    """
    if isinstance(dataset, IndexedDataset):
        return dataset.prefetch
    return 0 if options is None else options.experimental_per_replica_buffer_size


def hoist_one_shot_prefetch(
    starts: Sequence[Any], datasets: Sequence[Any], depth: int
) -> int:
    """Has what is read once be read ahead for all that read it, and returns 0 then.

    What says where it is is left to itself: iterators that do read ahead themselves.
    """
    pairs = zip(starts, datasets, strict=True)
    once = [(start, data) for start, data in pairs if isinstance(start, OneShotStart)]
    for start, dataset in once:
        if depth and not has_state(dataset):
            start.read_ahead(depth)
    return 0 if once else depth


def prefetches_to_devices(strategy: "Strategy", options: InputOptions | None) -> bool:
    """Whether what is read ahead is on the devices, too.

    Several workers first agree that all of them have a batch.

    Args:
        strategy: The strategy.
        options: What was asked for.
    """
    return strategy.extended.cluster is None and (
        options is None or options.experimental_fetch_to_device
    )


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
    cluster = strategy.extended.cluster
    own_rows = False
    if cluster is not None:
        policy = resolve_policy(dataset, options, cluster)
        own_rows = is_per_worker_policy(policy)
        if own_rows:
            dataset = shard_for_worker(dataset, policy, cluster)
    start = batches_of(dataset, argument)
    indexed = None
    if cluster is not None and not own_rows:
        indexed = local_rows_start(dataset, local_bounds_fn(strategy))
        if indexed is None:
            worker_batches.warn_full_reads(cluster)
    start = indexed or start

    replicas = strategy.num_replicas_in_sync
    local = strategy.extended.topology.local_replicas
    number = number_of_batches(dataset)
    if indexed is None or isinstance(dataset, IndexedDataset):
        depth = prefetch_depth(dataset, options)
    else:
        depth = 0  # a loader has `num_workers`, and tells whether its rows draw numbers
    once = isinstance(start, OneShotStart)
    depth = hoist_one_shot_prefetch([start], [dataset], depth)
    sources = SourceStates([dataset], [start])
    on_devices = depth if prefetches_to_devices(strategy, options) else 0
    pauses = (number,) if number else ()

    def read() -> Iterator[Any]:
        (batches,) = sources.start()
        if depth == on_devices:
            return batches
        return Prefetcher(map(copy_batch, batches), depth, pauses, sources=sources)

    shortest = options is not None and options.end_with_first_worker

    def parts() -> Iterator[ReplicaParts | EvenParts]:
        batches = read()
        return (_split(batch, replicas, local, argument) for batch in batches)

    def own_parts() -> Iterator[ReplicaParts]:
        batches = read()
        own = range(len(local))
        rounds = (_split(batch, len(own), own, argument) for batch in batches)
        assert cluster is not None
        return synchronize_rounds(map(_listed, rounds), cluster, not shortest)

    if own_rows:
        result = DistributedDataset(strategy, own_parts, sources=sources)
    elif indexed is not None:
        result = DistributedDataset(strategy, parts, sources=sources)
    else:
        native = get_engine().distribute_natively(strategy, [dataset], True, options)
        result = native or DistributedDataset(
            strategy, parts, on_devices, pauses, sources
        )
    if indexed is not None or (is_tf_dataset(dataset) and not own_rows):
        result._global_batches = dataset
    else:
        result._global_batches = BatchesForKeras(
            start, number, once, own_rows, dataset, depth, shortest
        )
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
    depth = min(prefetch_depth(dataset, options) for dataset in datasets)
    depth = hoist_one_shot_prefetch(starts, datasets, depth)
    once = any(isinstance(start, OneShotStart) for start in starts)
    sources = SourceStates(datasets, starts, 1 if per_replica else len(local))
    on_devices = depth if prefetches_to_devices(strategy, options) else 0
    shortest = options is not None and options.end_with_first_worker

    def own_rounds(iterators: list[Iterator[Any]]) -> Iterator[ReplicaParts]:
        turns = iterators if per_replica else iterators * len(local)
        return assemble_rounds(turns, partial, argument)

    def parts() -> Iterator[ReplicaParts]:
        started = sources.start()
        if depth == on_devices:
            read = own_rounds(started)
        else:
            rounds_kept = own_rounds([map(copy_batch, batches) for batches in started])
            read = Prefetcher(rounds_kept, depth, pauses, sources=sources)
        if cluster is None:
            return read
        return synchronize_rounds(read, cluster, partial and not shortest)

    counts = [number_of_batches(dataset) for dataset in datasets]
    known = [count for count in counts if count is not None]
    rounds = None
    if len(known) == len(counts) and per_replica:
        rounds = max(known) if partial else min(known)
    elif len(known) == len(counts):
        each = len(local)
        rounds = (known[0] + (each - 1 if partial else 0)) // each
    pauses = (rounds,) if rounds else ()
    result = native or DistributedDataset(strategy, parts, on_devices, pauses, sources)
    alone = datasets[0] if len(local) == 1 else None
    result._global_batches = BatchesForKeras(
        lambda: map(_joined, own_rounds([start() for start in starts])),
        rounds,
        once,
        cluster is not None,
        alone,
        depth,
        shortest,
    )
    return result


@dataclass
class BatchesForKeras:
    """Batches for Keras's own loop.

    Attributes:
        start: Starts to read them.
        number: How many there are, None if that is not known.
        once: Whether they can be read once only.
        own: Whether they are this worker's own, and the global batches those of all
            workers together; else all workers have the global batches.
        dataset: What the user gave, if it is these batches that it gives.
        depth: How many are to be read before they are asked for.
        shortest: Whether they end when the first worker has no more of its own.
    """

    start: Callable[[], Iterator[Any]]
    number: int | None
    once: bool
    own: bool
    dataset: Any
    depth: int
    shortest: bool = False


def keras_dataset(dataset: Any, strategy: "Strategy | None", method: str) -> Any:
    """What Keras's `fit` and its like read in the place of a distributed dataset.

    They split global batches themselves. Of batches that each worker has of its own,
    the workers tell each other how many there are.

    Args:
        dataset: Any argument of `fit`, which is returned if it is not distributed.
        strategy: The strategy of the model, None for none.
        method: "fit" or the like.

    Returns:
        A `tf.data.Dataset` of global batches, or `BatchesForKeras`.

    Raises:
        ValueError: If another strategy distributed the dataset.
    """
    cluster = None if strategy is None else strategy.extended.cluster
    if strategy is not None and _gives_own_rows(dataset, cluster):
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
    if dataset._sources is not None and dataset._sources.has_pending_restore:
        raise ValueError(
            "A dataset goes on where `load_state_dict` put it in a loop of your own. "
            f"`{method}` goes on with `keras_strategy.callbacks.BackupAndRestore`."
        )
    batches = dataset._global_batches
    if cluster is None or not isinstance(batches, BatchesForKeras) or not batches.own:
        return batches
    numbers = cluster.exchange("the number of batches of its own", batches.number)
    if 0 in numbers:
        raise WorkerInputError(
            "Every worker's dataset must have one batch or more. Received datasets of "
            f"these numbers of batches: {cluster.format_by_worker(numbers)}."
        )
    last = min if batches.shortest else max
    number = None if None in numbers else last(numbers)
    return replace(batches, number=number)


def reads_per_worker_rows(dataset: Any, strategy: "Strategy") -> bool:
    """Whether each worker's `fit` and its like read rows of its own from a dataset.

    Args:
        dataset: Any argument of `fit`.
        strategy: The strategy of the model.
    """
    if isinstance(dataset, DistributedDataset):
        batches = dataset._global_batches
        return isinstance(batches, BatchesForKeras) and batches.own
    return _gives_own_rows(dataset, strategy.extended.cluster)


def _gives_own_rows(dataset: Any, cluster: Cluster | None) -> bool:
    return cluster is not None and is_per_worker_policy(
        resolve_policy(dataset, None, cluster)
    )


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


def _split(
    batch: Any, replicas: int, local: range, argument: str
) -> ReplicaParts | EvenParts:
    """The rows of a global batch that each replica of this worker gets."""
    own = batch if isinstance(batch, LocalRows) else None
    batch = batch if own is None else own.batch
    arrays = [as_array(leaf, argument) for leaf in tree.flatten(batch)]
    try:
        rows = count_array_rows(arrays)
    except ValueError as error:
        raise ValueError(f"{argument}: {error} {_BATCH_FIRST}") from None
    rows, first = (rows, 0) if own is None else (own.global_rows, own.bounds[0][0])
    if rows % replicas == 0 and len(local) == replicas:
        return EvenParts(batch, arrays, replicas)
    batch = tree.pack_sequence_as(batch, arrays)
    bounds = split_rows(rows, replicas)
    parts = ReplicaParts(
        tree.map_structure(
            lambda leaf, b=begin - first, e=end - first: (
                None if leaf is None else leaf[b:e]
            ),
            batch,
        )
        for begin, end in bounds[local.start : local.stop]
    )
    # All workers split the same batches.
    counts = [end - begin for begin, end in bounds]
    parts.alike = len(set(counts)) == 1
    parts.rows = BatchRows()
    parts.rows.counts, parts.rows.first = tuple(counts), local.start
    return parts


def _listed(parts: ReplicaParts | EvenParts) -> ReplicaParts:
    """The parts, also where they are cut when somebody looks at them."""
    if isinstance(parts, ReplicaParts):
        return parts
    return ReplicaParts(
        parts.placed(lambda rows, i=i: rows[i]) for i in range(len(parts))
    )


def _joined(parts: ReplicaParts) -> Any:
    """The global batch of all replicas' parts."""

    def join(*leaves):
        if leaves[0] is None:
            return None
        if isinstance(leaves[0], np.ndarray):
            return np.concatenate(leaves)
        return keras.ops.concatenate(leaves)

    return tree.map_structure(join, *parts)


def predict(model: keras.Model, x: Any, gather: bool = False, **kwargs: Any) -> Any:
    """`model.predict`, and the predictions of other workers' rows if they are wanted.

    Where all workers have the same data, `model.predict` gives the predictions of all
    rows. Where each reads rows of its own it gives those of this worker's; all of them
    travel only with `gather=True`.

    Args:
        model: The model.
        x: See `keras.Model.predict`.
        gather: Whether to join the workers' own predictions. All workers must call
            this, and each gets all of them: first those of worker 0, in the order in
            which it has read the rows, then those of worker 1.
        **kwargs: Other arguments of `keras.Model.predict`.

    Returns:
        The predictions, as NumPy arrays in the structure of the model's outputs.

    Example:

    ```python
    import keras
    import numpy as np
    import keras_strategy as ks

    with ks.MirroredStrategy().scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    x = np.ones((4, 3), "float32")
    assert ks.predict(model, x, gather=True, verbose=0).shape == (4, 1)
    ```
    """
    predictions = model.predict(x, **kwargs)
    strategy = strategy_of_model(model)
    if not gather or strategy is None or not reads_per_worker_rows(x, strategy):
        return predictions
    workers = strategy.extended.group.workers
    with strategy.scope():

        def of_all(part):
            rows, _ = workers.gather("predict", keras.ops.convert_to_tensor(part), 0)
            return keras.ops.convert_to_numpy(rows)

        return tree.map_structure(of_all, predictions)
