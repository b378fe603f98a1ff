"""tf.data datasets, distributed by native tf.distribute.

A tf.function can iterate over them, and their elements are prefetched to the devices.
The elements are our `PerReplica`, which works there as any other value does.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.operators import py_builtins

from keras_strategy.backends.tensorflow.connection import native_name
from keras_strategy.backends.tensorflow.group import TensorFlowGroup
from keras_strategy.backends.tensorflow.tensors import common_rows, slice_rows
from keras_strategy.core import context
from keras_strategy.core.protocols import Strategy
from keras_strategy.core.step_state import BatchRows
from keras_strategy.data.distributed_dataset import (
    DistributedDataset,
    DistributedIterator,
    OptionalElement,
    PerReplicaSpec,
)
from keras_strategy.options import InputOptions
from keras_strategy.values import PerReplica


def distribute(
    strategy: Strategy,
    datasets: Sequence[Any],
    split: bool,
    options: InputOptions | None,
) -> "NativeDataset":
    """Distribute `tf.data.Dataset`s, see `Engine.distribute_natively`."""
    if split:
        (dataset,) = datasets
        local = strategy.extended.topology.local_replicas
        datasets = [split_by_rows(dataset, strategy.num_replicas_in_sync, local)]
    group = strategy.extended.group
    if isinstance(group, TensorFlowGroup):
        native_options = None
        if options is not None:
            mode = options.experimental_replication_mode.name
            fields = options._replace(
                experimental_replication_mode=tf.distribute.InputReplicationMode[mode]
            )
            # The fields after these are ours.
            native_options = tf.distribute.InputOptions(*fields[:4])
        native = group.native.distribute_datasets_from_function(
            # Native workers are pipelines, too, and each has a dataset of its own.
            lambda context: datasets[context.input_pipeline_id % len(datasets)],
            native_options,
        )
    else:
        (dataset,) = datasets
        device = native_name(strategy.extended.worker_devices[0])
        one_device = tf.distribute.OneDeviceStrategy(device)
        native = one_device.experimental_distribute_dataset(dataset)
    return NativeDataset(strategy, native)


def split_by_rows(dataset: Any, replicas: int, local: range) -> Any:
    """Return a dataset that has, of each global batch, an element per local replica."""
    # Native tf.distribute splits by rewriting the dataset's graph, which supports only
    # datasets that end in certain kinds of `batch`.
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
    rows: set[Any] = {shape[0] if shape.rank else None for shape in shapes}
    # The rows of each replica, if they are known and equal.
    local_rows = None
    if len(rows) == 1 and None not in rows:
        quotient, remainder = divmod(rows.pop(), replicas)
        local_rows = None if remainder else quotient

    def split(*element):
        element = element if type(spec) is tuple else element[0]
        rows = tf.cast(common_rows(tf.nest.flatten(element)), tf.int64)
        block = (rows + replicas - 1) // replicas

        def replica_element(replica):
            begin = tf.minimum(replica * block, rows)
            end = tf.minimum(begin + block, rows)

            def leaf_rows(leaf):
                result = slice_rows(leaf, (begin, end))
                if local_rows is not None and isinstance(result, tf.Tensor):
                    result.set_shape([local_rows, *result.shape[1:]])
                return result

            return tf.nest.map_structure(leaf_rows, element)

        return tf.data.Dataset.range(local.start, local.stop).map(replica_element)

    is_dense = all(isinstance(leaf, tf.TensorSpec) for leaf in tf.nest.flatten(spec))
    num_local = len(local)
    is_aligned = replicas % num_local == 0 == local.start % num_local
    if local_rows and is_dense and is_aligned:
        # The same result from tf.data itself, without a function call for each batch.
        result = dataset
        if num_local < replicas:
            result = result.rebatch(num_local * local_rows, drop_remainder=True)
            result = result.shard(replicas // num_local, local.start // num_local)
        result = result.rebatch(local_rows, drop_remainder=True)
    else:
        result = dataset.flat_map(split)
    count = int(dataset.cardinality())
    if count == tf.data.UNKNOWN_CARDINALITY:
        return result
    if count != tf.data.INFINITE_CARDINALITY:
        count *= len(local)
    return result.apply(tf.data.experimental.assert_cardinality(count))


class _Wrapper:
    """Wrapper of a native object, which tf.function and its loops see through."""

    # Its elements have our `PerReplica` in place of native distributed values.

    def __init__(self, strategy: Strategy, native: Any):
        self._strategy = strategy
        self._native = native

    def __tf_flatten__(self) -> Any:
        return (self._strategy,), (self._native,)

    @classmethod
    def __tf_unflatten__(cls, metadata: Any, components: Any) -> Any:
        return cls(*metadata, *components)

    def _convert(self, element: Any) -> Any:
        has_workers = self._strategy.extended.cluster is not None
        rows = None if has_workers else BatchRows()

        def convert(leaf):
            if isinstance(leaf, tf.distribute.DistributedValues):
                value = PerReplica(leaf.values)
                value.batch = rows
                return value
            # On a worker with one device, native tf.distribute returns plain tensors.
            return PerReplica([leaf]) if has_workers and tf.is_tensor(leaf) else leaf

        return tf.nest.map_structure(convert, element)

    @property
    def element_spec(self) -> Any:
        has_workers = self._strategy.extended.cluster is not None

        def convert(leaf):
            components = getattr(leaf, "_value_specs", [leaf] if has_workers else None)
            return leaf if components is None else PerReplicaSpec(components)

        return tf.nest.map_structure(convert, self._native.element_spec)


class NativeDataset(_Wrapper, DistributedDataset, tf.distribute.DistributedDataset):
    """A native distributed dataset whose elements are our `PerReplica`."""

    def __iter__(self) -> "NativeIterator":
        context.require_cross_replica(self._strategy, "DistributedDataset.__iter__")
        return NativeIterator(self._strategy, iter(self._native))

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        context.require_cross_replica(self._strategy, "DistributedDataset.reduce")
        return self._native.reduce(
            initial_state,
            lambda state, element: reduce_func(state, self._convert(element)),
        )


class NativeIterator(_Wrapper, DistributedIterator, tf.distribute.DistributedIterator):
    """A native distributed iterator whose elements are our `PerReplica`."""

    def __next__(self) -> Any:
        context.require_cross_replica(self._strategy, "DistributedIterator.__next__")
        cluster = self._strategy.extended.cluster
        try:
            if cluster is None:
                return self._convert(self._native.get_next())
            # A collective, in which a worker may be alone.
            with cluster.client.track_operation("the next element"):
                return self._convert(self._native.get_next())
        except tf.errors.OutOfRangeError:
            raise StopIteration from None

    def get_next_as_optional(self) -> Any:
        context.require_cross_replica(
            self._strategy, "DistributedIterator.get_next_as_optional"
        )
        return NativeOptional(self._strategy, self._native.get_next_as_optional())


class NativeOptional(_Wrapper, OptionalElement):
    """A native optional element; inside a tf.function `has_value()` is symbolic."""

    def has_value(self) -> Any:
        return self._native.has_value()

    def get_value(self) -> Any:
        return self._convert(self._native.get_value())


def _refuse_enumerate(data: Any, start: int) -> Any:
    raise NotImplementedError(
        "`enumerate` takes no distributed dataset or iterator in a tf.function, as in "
        "tf.distribute. Use `for batch in dataset:` and count in a tensor. Received: "
        f"{type(data).__name__}"
    )


py_builtins.enumerate_registry.register(_Wrapper, _refuse_enumerate)
