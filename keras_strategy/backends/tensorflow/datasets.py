"""tf.data datasets, distributed by native tf.distribute.

So they can be iterated over inside a tf.function, and are prefetched to the devices.
What comes out of them is our `PerReplica`, which works like any other value there.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_strategy.backends.tensorflow.devices import native_name
from keras_strategy.backends.tensorflow.group import TensorFlowGroup
from keras_strategy.backends.tensorflow.training import common_rows, slice_rows
from keras_strategy.core import context
from keras_strategy.core.row_range import BatchRows
from keras_strategy.input.dataset import (
    DistributedDataset,
    DistributedIterator,
    OptionalElement,
)
from keras_strategy.options.input import InputOptions
from keras_strategy.values.distributed import PerReplica

if TYPE_CHECKING:
    from keras_strategy.core.strategy import Strategy


def distribute(
    strategy: "Strategy",
    datasets: Sequence[Any],
    split: bool,
    options: InputOptions | None,
) -> "NativeDataset":
    """See `Backend.distribute_natively`.

    Raises:
        ValueError: If the elements are to be split, and are not batches.
    """
    if split:
        (dataset,) = datasets
        datasets = [
            split_by_rows(
                dataset,
                strategy.num_replicas_in_sync,
                strategy.extended.topology.local_replicas,
            )
        ]
    group = strategy.extended.group
    if isinstance(group, TensorFlowGroup):
        native = group.native.distribute_datasets_from_function(
            # Native workers are pipelines too, and this one has its own dataset.
            lambda context: datasets[context.input_pipeline_id % len(datasets)],
            _native_options(options),
        )
    else:
        (dataset,) = datasets
        device = native_name(strategy.extended.worker_devices[0])
        one = tf.distribute.OneDeviceStrategy(device)
        native = one.experimental_distribute_dataset(dataset)
    return NativeDataset(strategy, native)


def split_by_rows(dataset: Any, replicas: int, local: range) -> Any:
    """Makes a dataset of the replicas' parts out of one of global batches.

    The native way to split, a rewrite of the dataset's graph, knows only datasets that
    end in some kinds of `batch`.

    Args:
        dataset: Its elements are global batches.
        replicas: The number of replicas.
        local: The numbers of this worker's.

    Returns:
        A dataset with an element of each batch for each local replica in turn.

    Raises:
        ValueError: If the elements are scalars.
    """
    spec = dataset.element_spec
    shapes = [leaf.shape for leaf in tf.nest.flatten(spec) if hasattr(leaf, "shape")]
    if any(shape.rank == 0 for shape in shapes):
        raise ValueError(
            "Argument `dataset`: A batch must be made of arrays whose first dimension "
            "is its rows. Received elements of the shapes "
            f"{[tuple(shape) for shape in shapes]}. The elements must be batches; "
            "make them of single rows first, with `dataset.batch(global_batch_size)`."
        )
    if replicas == 1:
        return dataset
    rows = {shape[0] if shape.rank else None for shape in shapes}
    fixed = rows.pop() if len(rows) == 1 else None
    fixed = fixed // replicas if fixed is not None and fixed % replicas == 0 else None

    def parts(*element):
        element = element if type(spec) is tuple else element[0]
        leaves = [leaf for leaf in tf.nest.flatten(element) if leaf is not None]
        rows = tf.cast(common_rows(leaves), tf.int64)
        block = (rows + replicas - 1) // replicas

        def part(replica):
            begin = tf.minimum(replica * block, rows)
            end = tf.minimum(begin + block, rows)

            def rows_of_leaf(leaf):
                result = slice_rows(leaf, (begin, end))
                if fixed is not None and isinstance(result, tf.Tensor):
                    result.set_shape([fixed, *result.shape[1:]])
                return result

            return tf.nest.map_structure(rows_of_leaf, element)

        return tf.data.Dataset.range(local.start, local.stop).map(part)

    dense = all(isinstance(leaf, tf.TensorSpec) for leaf in tf.nest.flatten(spec))
    if fixed and dense and len(local) == replicas:
        # The same, done by tf.data itself, without a call of a function for each batch.
        result = dataset.rebatch(fixed, drop_remainder=True)
    else:
        result = dataset.flat_map(parts)
    count = int(dataset.cardinality())
    if count == tf.data.UNKNOWN_CARDINALITY:
        return result
    if count != tf.data.INFINITE_CARDINALITY:
        count *= len(local)
    return result.apply(tf.data.experimental.assert_cardinality(count))


def _native_options(options: InputOptions | None) -> Any:
    if options is None:
        return None
    mode = options.experimental_replication_mode.name
    fields = options._replace(
        experimental_replication_mode=tf.distribute.InputReplicationMode[mode]
    )
    # What comes after these is ours alone.
    return tf.distribute.InputOptions(*fields[:4])


def _ours(strategy: "Strategy", element: Any) -> Any:
    """The element with our `PerReplica` in the place of the native ones."""
    workers = strategy.extended.cluster is not None
    rows = None if workers else BatchRows()

    def convert(leaf):
        if isinstance(leaf, tf.distribute.DistributedValues):
            value = PerReplica(leaf.values)
            value.batch = rows
            return value
        # On a worker of one device, native tf.distribute leaves tensors what they are.
        return PerReplica([leaf]) if workers and tf.is_tensor(leaf) else leaf

    return tf.nest.map_structure(convert, element)


def _our_spec(strategy: "Strategy", spec: Any) -> Any:
    workers = strategy.extended.cluster is not None

    def convert(leaf):
        components = getattr(leaf, "_value_specs", [leaf] if workers else None)
        return leaf if components is None else PerReplica(components)

    return tf.nest.map_structure(convert, spec)


class _Flattened:
    """Lets tf.function and its loops see the native object inside of ours."""

    _strategy: Any
    _native: Any

    def __tf_flatten__(self) -> Any:
        return (self._strategy,), (self._native,)

    @classmethod
    def __tf_unflatten__(cls, metadata: Any, components: Any) -> Any:
        return cls(*metadata, *components)


class NativeDataset(_Flattened, DistributedDataset, tf.distribute.DistributedDataset):
    """A native distributed dataset that gives our `PerReplica` values."""

    def __init__(self, strategy: "Strategy", native: Any):
        self._strategy = strategy
        self._native = native

    def __iter__(self) -> "NativeIterator":
        context.require_cross_replica(self._strategy, "DistributedDataset.__iter__")
        return NativeIterator(self._strategy, iter(self._native))

    @property
    def element_spec(self) -> Any:
        return _our_spec(self._strategy, self._native.element_spec)

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        context.require_cross_replica(self._strategy, "DistributedDataset.reduce")
        return self._native.reduce(
            initial_state,
            lambda state, element: reduce_func(state, _ours(self._strategy, element)),
        )


class NativeIterator(
    _Flattened, DistributedIterator, tf.distribute.DistributedIterator
):
    """A native distributed iterator that gives our `PerReplica` values."""

    def __init__(self, strategy: "Strategy", native: Any):
        self._strategy = strategy
        self._native = native

    def __next__(self) -> Any:
        context.require_cross_replica(self._strategy, "DistributedIterator.__next__")
        try:
            return _ours(self._strategy, self._native.get_next())
        except tf.errors.OutOfRangeError:
            raise StopIteration from None

    def get_next_as_optional(self) -> Any:
        context.require_cross_replica(
            self._strategy, "DistributedIterator.get_next_as_optional"
        )
        return NativeOptional(self._strategy, self._native.get_next_as_optional())

    @property
    def element_spec(self) -> Any:
        return _our_spec(self._strategy, self._native.element_spec)


class NativeOptional(OptionalElement):
    """A native optional element; inside a tf.function `has_value()` is symbolic."""

    def __init__(self, strategy: "Strategy", native: Any):
        self._strategy = strategy
        self._native = native

    def has_value(self) -> Any:
        return self._native.has_value()

    def get_value(self) -> Any:
        return _ours(self._strategy, self._native.get_value())

    def __tf_flatten__(self) -> Any:
        return (self._strategy,), (self._native,)

    @classmethod
    def __tf_unflatten__(cls, metadata: Any, components: Any) -> Any:
        return cls(*components)
