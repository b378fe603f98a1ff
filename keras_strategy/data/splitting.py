"""Construction of distributed datasets: each replica's part of the user's data."""

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
    OneShotReader,
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

_BATCH_FIRST = (
    "The elements must be batches. If they are single rows, batch them first, with "
    "`dataset.batch(global_batch_size)` or the like."
)


@dataclass
class BatchesForKeras:
    """Batches of a distributed dataset for Keras's own loop.

    Attributes:
        start: Starts to read them.
        number: The number of batches, None if it is unknown.
        once: True if they can be read only once.
        per_worker: True if each worker has its own batches, which concatenate to the
            global batches; else all workers have the global batches.
        dataset: The user's dataset, if it gives exactly these batches.
        depth: The number of batches to prefetch.
        shortest: True if they end with the first worker that has no more.
    """

    start: Callable[[], Iterator[Any]]
    number: int | None
    once: bool
    per_worker: bool
    dataset: Any
    depth: int
    shortest: bool = False


def distribute(
    strategy: "Strategy", dataset: Any, options: InputOptions | None
) -> DistributedDataset:
    """Implement `Strategy.experimental_distribute_dataset`."""
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
    per_worker = False
    if cluster is not None:
        policy = resolve_policy(dataset, options, cluster)
        per_worker = is_per_worker_policy(policy)
        if per_worker:
            dataset = shard_for_worker(dataset, policy, cluster)
    start = batches_of(dataset, argument)
    indexed = None
    if cluster is not None and not per_worker:
        indexed = local_rows_start(dataset, local_bounds_fn(strategy))
        if indexed is None:
            worker_batches.warn_full_reads(cluster)
    start = indexed or start

    number = number_of_batches(dataset)
    if indexed is None or isinstance(dataset, IndexedDataset):
        depth = prefetch_depth(dataset, options)
    else:
        depth = 0  # a DataLoader has `num_workers`, and observes random draws
    depth = _hoist_one_shot_prefetch([start], [dataset], depth)
    device_depth = depth if _prefetches_to_devices(strategy, options) else 0
    pauses = (number,) if number else ()
    shortest = options is not None and options.end_with_first_worker
    sources = SourceStates([dataset], [start])
    replicas = strategy.num_replicas_in_sync
    local = strategy.extended.topology.local_replicas

    def read() -> Iterator[Any]:
        (batches,) = sources.start()
        if depth == device_depth:
            return batches
        return Prefetcher(map(copy_batch, batches), depth, pauses, sources=sources)

    def parts() -> Iterator[ReplicaParts | EvenParts]:
        return (_split(batch, replicas, local, argument) for batch in read())

    def per_worker_parts() -> Iterator[ReplicaParts]:
        count = len(local)
        rounds = (_split(batch, count, range(count), argument) for batch in read())
        assert cluster is not None
        return synchronize_rounds(map(_sliced, rounds), cluster, not shortest)

    if per_worker:
        result = DistributedDataset(strategy, per_worker_parts, sources=sources)
    elif indexed is not None:
        result = DistributedDataset(strategy, parts, sources=sources)
    else:
        native = get_engine().distribute_natively(strategy, [dataset], True, options)
        result = native or DistributedDataset(
            strategy, parts, device_depth, pauses, sources
        )
    if indexed is not None or (is_tf_dataset(dataset) and not per_worker):
        result._global_batches = dataset
    else:
        once = isinstance(start, OneShotReader)
        result._global_batches = BatchesForKeras(
            start, number, once, per_worker, dataset, depth, shortest
        )
    return result


def distribute_from_function(
    strategy: "Strategy",
    dataset_fn: Callable[[InputContext], Any],
    options: InputOptions | None,
) -> DistributedDataset:
    """Implement `Strategy.distribute_datasets_from_function`."""
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
        pipelines, local_pipelines = replicas, list(local)
    elif cluster is None:
        pipelines, local_pipelines = 1, [0]
    else:
        pipelines, local_pipelines = cluster.size, [cluster.rank]
    datasets = [
        dataset_fn(InputContext(pipelines, i, replicas)) for i in local_pipelines
    ]
    argument = "The return value of `dataset_fn`"
    for dataset in datasets:
        _check(strategy, "distribute_datasets_from_function", None, dataset, argument)
    starts = [batches_of(dataset, argument) for dataset in datasets]
    native = get_engine().distribute_natively(strategy, datasets, False, options)
    partial = not all(map(has_fixed_shapes, datasets))
    depth = min(prefetch_depth(dataset, options) for dataset in datasets)
    depth = _hoist_one_shot_prefetch(starts, datasets, depth)
    device_depth = depth if _prefetches_to_devices(strategy, options) else 0
    shortest = options is not None and options.end_with_first_worker
    sources = SourceStates(datasets, starts, 1 if per_replica else len(local))

    def local_rounds(iterators: list[Iterator[Any]]) -> Iterator[ReplicaParts]:
        turns = iterators if per_replica else iterators * len(local)
        return assemble_rounds(turns, partial, argument)

    def parts() -> Iterator[ReplicaParts]:
        iterators = sources.start()
        if depth == device_depth:
            rounds = local_rounds(iterators)
        else:
            copies = local_rounds([map(copy_batch, batches) for batches in iterators])
            rounds = Prefetcher(copies, depth, pauses, sources=sources)
        if cluster is None:
            return rounds
        return synchronize_rounds(rounds, cluster, partial and not shortest)

    counts = [number_of_batches(dataset) for dataset in datasets]
    known = [count for count in counts if count is not None]
    number = None
    if len(known) == len(counts) and per_replica:
        number = max(known) if partial else min(known)
    elif len(known) == len(counts):
        number = (known[0] + (len(local) - 1 if partial else 0)) // len(local)
    pauses = (number,) if number else ()
    result = native or DistributedDataset(
        strategy, parts, device_depth, pauses, sources
    )
    result._global_batches = BatchesForKeras(
        lambda: map(_concatenate, local_rounds([start() for start in starts])),
        number,
        any(isinstance(start, OneShotReader) for start in starts),
        cluster is not None,
        datasets[0] if len(local) == 1 else None,
        depth,
        shortest,
    )
    return result


def keras_dataset(dataset: Any, strategy: "Strategy | None", method: str) -> Any:
    """Return what `fit` and the like read instead of a distributed dataset.

    They split global batches themselves. Where each worker has its own batches, the
    workers exchange how many.

    Args:
        dataset: Any argument of `fit`, returned as it is if it is not distributed.
        strategy: The strategy of the model, or None.
        method: "fit" or the like.

    Returns:
        A `tf.data.Dataset` of global batches, or `BatchesForKeras`.

    Raises:
        ValueError: If another strategy distributed the dataset.
    """
    cluster = None if strategy is None else strategy.extended.cluster
    if strategy is not None and _has_per_worker_policy(dataset, cluster):
        dataset = distribute(strategy, dataset, None)
    if not isinstance(dataset, DistributedDataset):
        return dataset
    if dataset._strategy is not (strategy or context.default_strategy()):
        raise ValueError(
            f"`{method}` received a dataset that {dataset._strategy!r} distributed, "
            f"and the model belongs to {strategy or 'no strategy'!r}. Pass `{method}` "
            "the original dataset, or create the model in the scope of that strategy."
        )
    if dataset._sources is not None and dataset._sources.has_pending_restore:
        raise ValueError(
            "`load_state_dict` has set the position of a dataset for a custom loop. "
            f"Resume `{method}` with `keras_strategy.callbacks.BackupAndRestore`."
        )
    batches = dataset._global_batches
    if (
        cluster is None
        or not isinstance(batches, BatchesForKeras)
        or not batches.per_worker
    ):
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
    """Return True if in `fit` and the like each worker reads its own batches."""
    if isinstance(dataset, DistributedDataset):
        batches = dataset._global_batches
        return isinstance(batches, BatchesForKeras) and batches.per_worker
    return _has_per_worker_policy(dataset, strategy.extended.cluster)


def _has_per_worker_policy(dataset: Any, cluster: Cluster | None) -> bool:
    return cluster is not None and is_per_worker_policy(
        resolve_policy(dataset, None, cluster)
    )


def predict(model: keras.Model, x: Any, gather: bool = False, **kwargs: Any) -> Any:
    """Call `model.predict` and, on request, gather the predictions of all workers.

    Where all workers have the same data, `model.predict` returns the predictions of all
    rows. Where each worker reads its own data, it returns those of this worker's rows;
    `gather=True` returns those of all workers.

    Args:
        model: A model, created in a strategy's scope or not.
        x: See `keras.Model.predict`.
        gather: If True, concatenate the workers' predictions. All workers must call
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

    def gather_rows(array):
        rows, _ = workers.gather("predict", keras.ops.convert_to_tensor(array), 0)
        return keras.ops.convert_to_numpy(rows)

    with strategy.scope():
        return tree.map_structure(gather_rows, predictions)


def prefetch_depth(dataset: Any, options: InputOptions | None) -> int:
    """Return how many batches of a dataset to prefetch.

    An `IndexedDataset` sets it, since its rows are the same whenever they are read. Any
    other Python code is prefetched only if options request it. `tf.data`, and loaders
    with their own threads or processes, prefetch by themselves; arrays need none.
    """
    if isinstance(dataset, IndexedDataset):
        return dataset.prefetch
    return 0 if options is None else options.experimental_per_replica_buffer_size


def _hoist_one_shot_prefetch(
    readers: Sequence[Any], datasets: Sequence[Any], depth: int
) -> int:
    """Have one-shot readers prefetch for all their iterations, and return 0 then.

    Stateful iterators are not prefetched: they do that themselves.
    """
    once = [
        (reader, dataset)
        for reader, dataset in zip(readers, datasets, strict=True)
        if isinstance(reader, OneShotReader)
    ]
    for reader, dataset in once:
        if depth and not has_state(dataset):
            reader.prefetch(depth)
    return 0 if once else depth


def _prefetches_to_devices(strategy: "Strategy", options: InputOptions | None) -> bool:
    # Several workers first have to agree that each of them has a batch.
    return strategy.extended.cluster is None and (
        options is None or options.experimental_fetch_to_device
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
    """Split a global batch, or this worker's rows of it, over the local replicas."""
    local_rows = batch if isinstance(batch, LocalRows) else None
    batch = batch if local_rows is None else local_rows.batch
    arrays = [as_array(leaf, argument) for leaf in tree.flatten(batch)]
    try:
        rows, first = count_array_rows(arrays), 0
    except ValueError as error:
        raise ValueError(f"{argument}: {error} {_BATCH_FIRST}") from None
    if local_rows is not None:
        rows, first = local_rows.global_rows, local_rows.bounds[0][0]
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
    counts = [end - begin for begin, end in bounds]
    # Known without an exchange: all workers split the same batches.
    parts.alike = len(set(counts)) == 1
    parts.rows = BatchRows()
    parts.rows.counts, parts.rows.first = tuple(counts), local.start
    return parts


def _sliced(parts: ReplicaParts | EvenParts) -> ReplicaParts:
    if isinstance(parts, ReplicaParts):
        return parts
    return ReplicaParts(
        parts.placed(lambda rows, i=i: rows[i]) for i in range(len(parts))
    )


def _concatenate(parts: ReplicaParts) -> Any:
    """Return the global batch of all replicas' parts."""

    def concatenate(*leaves):
        if leaves[0] is None:
            return None
        if isinstance(leaves[0], np.ndarray):
            return np.concatenate(leaves)
        return keras.ops.concatenate(leaves)

    return tree.map_structure(concatenate, *parts)
