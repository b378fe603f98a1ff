"""How a strategy distributes data: datasets, and values made for each replica."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keras import tree

from keras_strategy.core import context
from keras_strategy.input import splitting
from keras_strategy.input.dataset import DistributedDataset
from keras_strategy.options.input import InputContext, InputOptions
from keras_strategy.values.distributed import PerReplica, ValueContext

if TYPE_CHECKING:
    from keras_strategy.core.strategy import Strategy


class DataMethods:
    """The methods that distribute data, for `Strategy` to inherit."""

    def experimental_distribute_values_from_function(
        self: "Strategy", value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Makes a distributed value out of one value for each replica.

        Args:
            value_fn: Called once for each local replica with a `ValueContext`.

        Returns:
            The structure that `value_fn` returned, with a `PerReplica` value in
            the place of each leaf. With one replica, what `value_fn` returned.

        Raises:
            RuntimeError: Inside a function that `run` calls.

        Example:

        ```python
        import keras_strategy as ks

        strategy = ks.MirroredStrategy()
        ids = strategy.experimental_distribute_values_from_function(
            lambda context: context.replica_id_in_sync_group
        )
        n = strategy.num_replicas_in_sync
        assert strategy.experimental_local_results(ids) == tuple(range(n))
        ```
        """
        context.require_cross_replica(
            self, "experimental_distribute_values_from_function"
        )
        replicas = self.num_replicas_in_sync
        local = self.extended.topology.local_replicas
        values = [value_fn(ValueContext(i, replicas)) for i in local]
        if replicas == 1:
            return values[0]
        return tree.map_structure(lambda *leaves: PerReplica(leaves), *values)

    def experimental_distribute_dataset(
        self: "Strategy", dataset: Any, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Distributes a dataset of global batches.

        Every batch is split by rows, in order: with N replicas each gets
        ceil(rows / N) rows, the last ones fewer or none.

        Args:
            dataset: A `tf.data.Dataset`, a torch `DataLoader`, a
                `keras.utils.PyDataset`, a list, or any other iterable or iterator of
                batches. A batch is an array, or a structure of arrays of the same
                number of rows.
            options: An `InputOptions`, or None.

        Returns:
            A `DistributedDataset`, which gives the structure of the batch with a
            `PerReplica` in the place of each array; with one replica, a tensor.

        Raises:
            TypeError: If `dataset` is no dataset, or `options` no options.
            ValueError: If the dataset was distributed before; and, when it is read, if
                its elements are not batches.
            RuntimeError: Inside a function that `run` calls, or inside another
                strategy's scope.

        Example:

        ```python
        import numpy as np
        import keras_strategy as ks

        strategy = ks.MirroredStrategy()
        batches = [(np.ones((4, 3), "float32"), np.ones((4,), "float32"))]
        for x, y in strategy.experimental_distribute_dataset(batches):
            total = strategy.reduce("SUM", y, axis=0)
        assert float(total) == 4.0
        ```
        """
        return splitting.distribute(self, dataset, options)

    def distribute_datasets_from_function(
        self: "Strategy",
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Distributes a dataset whose batches are those of one replica each.

        Each worker calls it for a dataset of its own, which its replicas read. They
        take the batches in turn. Those that find none left at the end
        get one of 0 rows; where a `tf.data.Dataset` promises batches of one fixed
        shape, such a last round is dropped, as in tf.distribute.

        Args:
            dataset_fn: Called with an `InputContext`, returns a dataset of any kind
                that `experimental_distribute_dataset` takes. With the option
                `InputReplicationMode.PER_REPLICA` it is called for each replica, as
                one of several pipelines.
            options: An `InputOptions`, or None.

        Returns:
            A `DistributedDataset`.

        Raises:
            TypeError: If `dataset_fn` is not a function that returns a dataset, or
                `options` no options.
            RuntimeError: Inside a function that `run` calls, or inside another
                strategy's scope.

        Example:

        ```python
        import numpy as np
        import keras_strategy as ks

        strategy = ks.MirroredStrategy()
        n = strategy.num_replicas_in_sync

        def dataset_fn(context):
            rows = context.get_per_replica_batch_size(4 * n)
            return [np.ones((rows, 3), "float32") for _ in range(2 * n)]

        steps = [x for x in strategy.distribute_datasets_from_function(dataset_fn)]
        assert len(steps) == 2
        ```
        """
        return splitting.distribute_from_function(self, dataset_fn, options)

    def experimental_distribute_datasets_from_function(
        self: "Strategy",
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """The old name of `distribute_datasets_from_function`."""
        return splitting.distribute_from_function(self, dataset_fn, options)
