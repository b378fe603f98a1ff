"""Options of datasets."""

import enum
from typing import Any, NamedTuple


class InputContext:
    """Part of the input that a dataset function creates.

    Args:
        num_input_pipelines: The number of pipelines on all workers.
        input_pipeline_id: Index of this pipeline, from 0.
        num_replicas_in_sync: The number of replicas on all workers.

    Example:

    ```python
    import keras_strategy as ks

    context = ks.InputContext(num_replicas_in_sync=4)
    assert context.get_per_replica_batch_size(32) == 8
    ```
    """

    def __init__(
        self,
        num_input_pipelines: int = 1,
        input_pipeline_id: int = 0,
        num_replicas_in_sync: int = 1,
    ):
        self._num_input_pipelines = num_input_pipelines
        self._input_pipeline_id = input_pipeline_id
        self._num_replicas_in_sync = num_replicas_in_sync

    @property
    def num_input_pipelines(self) -> int:
        """The number of pipelines on all workers."""
        return self._num_input_pipelines

    @property
    def input_pipeline_id(self) -> int:
        """Index of this pipeline, from 0."""
        return self._input_pipeline_id

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas on all workers."""
        return self._num_replicas_in_sync

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the number of rows of one replica's batch.

        Args:
            global_batch_size: Rows of the global batch.

        Returns:
            `global_batch_size` divided by the number of replicas.

        Raises:
            ValueError: If it is not a multiple of the number of replicas.

        Example:

        ```python
        import keras_strategy as ks

        assert ks.InputContext(1, 0, 2).get_per_replica_batch_size(64) == 32
        ```
        """
        if global_batch_size % self._num_replicas_in_sync:
            raise ValueError(
                "Argument `global_batch_size` must be a multiple of the "
                f"{self._num_replicas_in_sync} replicas. Received: "
                f"global_batch_size={global_batch_size}"
            )
        return global_batch_size // self._num_replicas_in_sync

    def __repr__(self) -> str:
        return (
            f"InputContext(num_input_pipelines={self.num_input_pipelines}, "
            f"input_pipeline_id={self.input_pipeline_id}, "
            f"num_replicas_in_sync={self.num_replicas_in_sync})"
        )


class InputReplicationMode(enum.Enum):
    """Number of calls of a dataset function.

    Attributes:
        PER_WORKER: Once; the replicas take its elements in turn.
        PER_REPLICA: Once for each replica, which reads all elements of its dataset.
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


class AutoShardPolicy(enum.Enum):
    """Division of a dataset between several workers.

    Attributes:
        AUTO: The policy in the options of a `tf.data.Dataset`, or the one that the
            sampler of a torch `DataLoader` implies; otherwise DATA.
        FILE: Each worker reads its own files of a `tf.data.Dataset`, as tf.distribute
            shards them. For other datasets, pass each worker its share of
            `keras_strategy.files` and use OFF.
        DATA: Every worker has the same global batches and computes on its own rows of
            them. If the dataset can be indexed, a worker reads only those rows.
        OFF: Each worker has its own rows. A global batch is the rows of all workers
            in a step, in rank order. A worker whose data has ended continues without
            rows.
        HINT: Global batches of a `tf.data.Dataset` that calls `shard` with
            `tf.data.experimental.SHARD_HINT`, which is replaced by the worker's shard.
    """

    AUTO = "AUTO"
    FILE = "FILE"
    DATA = "DATA"
    OFF = "OFF"
    HINT = "HINT"


class _Fields(NamedTuple):
    experimental_fetch_to_device: bool
    experimental_replication_mode: InputReplicationMode
    experimental_place_dataset_on_device: bool
    experimental_per_replica_buffer_size: int
    auto_shard_policy: AutoShardPolicy
    end_with_first_worker: bool


class InputOptions(_Fields):
    """Options for distributing a dataset.

    With options, elements of all kinds of data are prefetched: a thread reads them
    while the loop computes. Without options, elements are prefetched only where that
    cannot be observed, see [Distributed input](distributed_input.md).

    Attributes:
        experimental_fetch_to_device: True to prefetch elements to the replicas'
            devices rather than to the host. None means True. With several workers
            they are prefetched to the host.
        experimental_replication_mode: An `InputReplicationMode`. PER_REPLICA is for
            `distribute_datasets_from_function`.
        experimental_place_dataset_on_device: True to run the dataset itself on the
            replicas' devices; for PER_REPLICA without fetching to the device, with a
            `tf.data.Dataset` on TensorFlow.
        experimental_per_replica_buffer_size: Elements to prefetch for each replica; 0
            for none. An `IndexedDataset` has its own `prefetch`.
        auto_shard_policy: An `AutoShardPolicy`, for several workers. Not needed if the
            options of a `tf.data.Dataset` have a policy other than AUTO.
        end_with_first_worker: True to end an epoch when the first worker has no more
            rows, where workers read their own rows. False ends it with the last one,
            and a worker without rows takes part with none.

    Raises:
        ValueError: If the options do not fit together.

    Example:

    ```python
    import keras_strategy as ks

    options = ks.InputOptions(experimental_per_replica_buffer_size=2)
    assert options.experimental_fetch_to_device
    ```
    """

    __slots__ = ()

    def __new__(
        cls,
        experimental_fetch_to_device: bool | None = None,
        experimental_replication_mode: Any = InputReplicationMode.PER_WORKER,
        experimental_place_dataset_on_device: bool = False,
        experimental_per_replica_buffer_size: int = 1,
        auto_shard_policy: Any = AutoShardPolicy.AUTO,
        end_with_first_worker: bool = False,
    ):
        """Check the options."""
        # `tf.data.experimental.AutoShardPolicy` has these names.
        policy = str(getattr(auto_shard_policy, "name", auto_shard_policy)).upper()
        if policy not in AutoShardPolicy.__members__:
            raise ValueError(
                "Argument `auto_shard_policy` must be an `AutoShardPolicy`: AUTO, "
                "FILE, DATA, OFF or HINT. "
                f"Received: auto_shard_policy={auto_shard_policy!r}"
            )
        if experimental_per_replica_buffer_size < 0:
            raise ValueError(
                "Argument `experimental_per_replica_buffer_size` must be 0 or more. "
                "Received: experimental_per_replica_buffer_size="
                f"{experimental_per_replica_buffer_size}"
            )
        if experimental_fetch_to_device is None:
            experimental_fetch_to_device = True
        # `tf.distribute.InputReplicationMode` has these names.
        mode = str(getattr(experimental_replication_mode, "name", None))
        if mode not in InputReplicationMode.__members__:
            raise ValueError(
                "Argument `experimental_replication_mode` must be an "
                "`InputReplicationMode`. Received: experimental_replication_mode="
                f"{experimental_replication_mode!r}"
            )
        mode = InputReplicationMode[mode]
        if experimental_place_dataset_on_device and (
            experimental_fetch_to_device or mode is not InputReplicationMode.PER_REPLICA
        ):
            raise ValueError(
                "`experimental_place_dataset_on_device=True` needs "
                "`experimental_replication_mode=InputReplicationMode.PER_REPLICA` and "
                "`experimental_fetch_to_device=False`. Received: "
                f"experimental_replication_mode={experimental_replication_mode}, "
                f"experimental_fetch_to_device={experimental_fetch_to_device}"
            )
        return super().__new__(
            cls,
            experimental_fetch_to_device,
            mode,
            experimental_place_dataset_on_device,
            experimental_per_replica_buffer_size,
            AutoShardPolicy[policy],
            end_with_first_worker,
        )
