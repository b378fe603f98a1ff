"""Construction of distributed datasets: each replica's part of the user's data."""

import functools
import glob
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
from keras import tree

from keras_strategy.cluster.membership import Cluster
from keras_strategy.core import context
from keras_strategy.core.protocols import Strategy
from keras_strategy.core.registry import get_engine
from keras_strategy.core.step_state import BatchRows, LocalRows
from keras_strategy.data import worker_batches
from keras_strategy.data.distributed_dataset import (
    DistributedDataset,
    EvenParts,
    ReplicaParts,
    place_element,
)
from keras_strategy.data.prefetch import Prefetcher, SourceStates, copy_batch
from keras_strategy.data.sources.iterable import as_array
from keras_strategy.data.sources.kinds import find_source, source_of
from keras_strategy.errors import WorkerInputError
from keras_strategy.options import InputContext, InputOptions, InputReplicationMode
from keras_strategy.training.ownership import strategy_of_model
from keras_strategy.training.row_weights import local_bounds, split_rows
from keras_strategy.training.train_step import count_array_rows

_BATCH_FIRST = (
    "The elements must be batches. If they are single rows, batch them first, with "
    "`dataset.batch(global_batch_size)` or the like."
)


_NO_OPTIONS = InputOptions(experimental_per_replica_buffer_size=0)


@dataclass
class BatchesForKeras:
    """Batches of a distributed dataset for Keras's own loop."""

    start: Callable[[], Iterator[Any]]
    # None if it is unknown.
    number: int | None
    # True if they can be read only once.
    once: bool
    # True if each worker has its own batches, which concatenate to the global ones.
    per_worker: bool
    # The user's `tf.data.Dataset`, if it gives exactly these batches.
    tf_dataset: Any
    # How many to prefetch.
    depth: int
    # True if they end with the first worker that has no more.
    shortest: bool


def distribute(
    strategy: Strategy, dataset: Any, options: InputOptions | None
) -> DistributedDataset:
    """Implement `Strategy.experimental_distribute_dataset`."""
    argument = "Argument `dataset`"
    chosen = _check_call(strategy, "experimental_distribute_dataset", options)
    source, local_rows = source_of(dataset, argument), None
    if chosen.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise NotImplementedError(
            "InputReplicationMode.PER_REPLICA is for "
            "`distribute_datasets_from_function`: a dataset of global batches is read "
            f"once for all replicas. Received: options={options!r}"
        )
    cluster = strategy.extended.cluster
    per_worker = False
    if cluster is not None:
        policy = source.per_worker_policy(chosen.auto_shard_policy, cluster)
        per_worker = policy is not None
        if policy is not None:
            source = source.shard(policy, cluster)
        else:
            bounds = functools.partial(local_bounds, strategy.extended.topology)
            local_rows = source.local_rows(bounds)
            if local_rows is None:
                worker_batches.warn_once(cluster, worker_batches.FULL_READS)
    tf_dataset, source = source.tf_dataset, local_rows or source
    depth = source.start_prefetch(chosen.experimental_per_replica_buffer_size)
    replicas = strategy.num_replicas_in_sync
    local = strategy.extended.topology.local_replicas
    if per_worker:
        replicas, local = len(local), range(len(local))

    def split(iterators):
        (batches,) = iterators
        return (_split(b, replicas, local, argument, per_worker) for b in batches)

    batches = BatchesForKeras(
        source.batches,
        source.count(),
        source.once,
        per_worker,
        tf_dataset,
        depth,
        chosen.end_with_first_worker,
    )
    result, is_global_tf = None, tf_dataset is not None and not per_worker
    if is_global_tf:
        result = get_engine().distribute_natively(strategy, [dataset], True, options)
    if result is None:
        states = SourceStates([source])
        result = _read_sources(strategy, states, split, batches, chosen)
    result._global_batches = dataset if local_rows or is_global_tf else batches
    return result


def distribute_from_function(
    strategy: Strategy,
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
    chosen = _check_call(strategy, "distribute_datasets_from_function", options)
    replicas = strategy.num_replicas_in_sync
    cluster = strategy.extended.cluster
    local = strategy.extended.topology.local_replicas
    # How many batches of each dataset make up an element.
    turns = len(local)
    if chosen.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        turns, pipelines, local_pipelines = 1, replicas, list(local)
    elif cluster is None:
        pipelines, local_pipelines = 1, [0]
    else:
        pipelines, local_pipelines = cluster.size, [cluster.rank]
    datasets = [
        dataset_fn(InputContext(pipelines, i, replicas)) for i in local_pipelines
    ]
    argument = "The return value of `dataset_fn`"
    sources = [source_of(dataset, argument) for dataset in datasets]
    result = None
    if all(source.tf_dataset is not None for source in sources):
        result = get_engine().distribute_natively(strategy, datasets, False, options)
    partial = not all(source.has_fixed_shapes for source in sources)

    def local_rounds(iterators):
        return worker_batches.assemble_rounds(iterators * turns, partial, argument)

    number, buffer = None, chosen.experimental_per_replica_buffer_size
    counts = [source.count() for source in sources]
    known = [count for count in counts if count is not None]
    if len(known) == len(counts):
        batches = max(known) + turns - 1 if partial else min(known)
        number = batches // turns
    batches = BatchesForKeras(
        lambda: (
            parts.placed(_concatenate)
            for parts in local_rounds([source.batches() for source in sources])
        ),
        number,
        any(source.once for source in sources),
        cluster is not None,
        sources[0].tf_dataset if len(local) == 1 else None,
        min([source.start_prefetch(buffer) for source in sources]),
        chosen.end_with_first_worker,
    )
    if result is None:
        states = SourceStates(sources, turns)
        result = _read_sources(strategy, states, local_rounds, batches, chosen, partial)
    result._global_batches = batches
    return result


def _read_sources(
    strategy: Strategy,
    states: SourceStates,
    to_parts: Callable[[list[Any]], Iterator[Any]],
    batches: BatchesForKeras,
    options: InputOptions,
    partial: bool = True,
) -> DistributedDataset:
    """Return a dataset of the elements that `to_parts` makes of what sources give."""
    cluster, pauses = strategy.extended.cluster, list(filter(None, [batches.number]))
    # Several workers first have to agree that each of them has a batch.
    to_devices = cluster is None and options.experimental_fetch_to_device

    def prefetch(elements: Iterator[Any]) -> Iterator[Any]:
        if batches.depth == 0:
            return elements
        return Prefetcher(elements, batches.depth, pauses, sources=states)

    def start() -> Iterator[Any]:
        iterators: list[Any] = states.start()
        if batches.depth and not to_devices:
            iterators = [map(copy_batch, iterator) for iterator in iterators]
        parts = to_parts(iterators)
        if not to_devices:
            parts = prefetch(parts)
        if cluster is not None and batches.per_worker:
            partial_rounds = partial and not batches.shortest
            parts = worker_batches.synchronize_rounds(parts, cluster, partial_rounds)
        place = functools.partial(place_element, strategy.extended.group)
        placed = map(place, parts, itertools.count())
        return prefetch(placed) if to_devices else placed

    return DistributedDataset(strategy, start, states)


def keras_dataset(dataset: Any, strategy: Strategy | None, method: str) -> Any:
    """Return what `fit` and the like read instead of a distributed dataset."""
    # They split global batches themselves. Where each worker has its own batches, the
    # workers exchange how many. Any other argument is returned as it is.
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
    if cluster is None or not _is_per_worker(batches):
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


def _is_per_worker(batches: Any) -> bool:
    return isinstance(batches, BatchesForKeras) and batches.per_worker


def _has_per_worker_policy(dataset: Any, cluster: Cluster | None) -> bool:
    if cluster is None:
        return False
    policy = _NO_OPTIONS.auto_shard_policy
    return find_source(dataset).per_worker_policy(policy, cluster) is not None


def files(
    pattern: str | Iterable[str], input_context: InputContext | None = None
) -> list[str]:
    """Return the files that this worker is to read: every N-th of the sorted names.

    Args:
        pattern: A pattern for `glob.glob`, with `**` for all directories below, or the
            names themselves.
        input_context: The argument of a dataset function. Without one, the files are
            those for this worker in the current strategy.

    Raises:
        ValueError: If there are fewer files than workers: one would have nothing to
            read.

    Example:

    ```python
    import keras_strategy as ks

    context = ks.InputContext(num_input_pipelines=2, input_pipeline_id=1)
    assert ks.files(["c.csv", "a.csv", "b.csv"], context) == ["b.csv"]
    ```
    """
    by_pattern = isinstance(pattern, str)
    names = sorted(glob.glob(pattern, recursive=True) if by_pattern else pattern)
    if input_context is None:
        cluster = context.get_strategy().extended.cluster
        size, rank = (1, 0) if cluster is None else (cluster.size, cluster.rank)
    else:
        size = input_context.num_input_pipelines
        rank = input_context.input_pipeline_id
    if len(names) < size:
        raise ValueError(
            f"Each of the {size} workers must have at least one file to read. "
            f"Received: pattern={pattern!r}, of {len(names)} files"
        )
    return names[rank::size]


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
    if not gather or strategy is None:
        return predictions
    if isinstance(x, DistributedDataset):
        per_worker = _is_per_worker(x._global_batches)
    else:
        per_worker = _has_per_worker_policy(x, strategy.extended.cluster)
    if not per_worker:
        return predictions
    workers = strategy.extended.group.workers

    def gather_rows(array):
        rows, _ = workers.gather("predict", keras.ops.convert_to_tensor(array), 0)
        return keras.ops.convert_to_numpy(rows)

    with strategy.scope():
        return tree.map_structure(gather_rows, predictions)


def _check_call(strategy: Strategy, method: str, options: Any) -> InputOptions:
    context.require_cross_replica(strategy, method)
    if options is not None and not isinstance(options, InputOptions):
        raise TypeError(
            "Argument `options` must be a `keras_strategy.InputOptions` or None. "
            f"Received: options={options!r} of type {type(options).__name__}"
        )
    return _NO_OPTIONS if options is None else options


def _split(
    batch: Any, replicas: int, local: range, argument: str, slice_now: bool
) -> Any:
    """Split a global batch, or this worker's rows of it, over the local replicas."""
    # Equal parts are sliced when they are placed, unless `slice_now` is set.
    local_rows = batch if isinstance(batch, LocalRows) else None
    batch = batch if local_rows is None else local_rows.batch
    arrays = [as_array(leaf, argument) for leaf in tree.flatten(batch)]
    try:
        rows, first = count_array_rows(arrays), 0
    except ValueError as error:
        raise ValueError(f"{argument}: {error} {_BATCH_FIRST}") from None
    if local_rows is not None:
        rows, first = local_rows.global_rows, local_rows.bounds[0][0]
    if rows % replicas == 0 and len(local) == replicas and not slice_now:
        return EvenParts(batch, arrays, rows, replicas)
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


def _concatenate(leaves: Sequence[Any]) -> Any:
    """Return the rows of all replicas in one array."""
    if leaves[0] is None:
        return None
    if isinstance(leaves[0], np.ndarray):
        return np.concatenate(leaves)
    return keras.ops.concatenate(leaves)
