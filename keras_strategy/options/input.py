"""What a dataset function is told, and how one asks for its data to be handled."""

import enum
from typing import Any, NamedTuple


class InputContext:
    """Tells a dataset function which part of the input it makes.

    Args:
        num_input_pipelines: How many pipelines there are, over all workers.
        input_pipeline_id: The number of this one, from 0.
        num_replicas_in_sync: The number of replicas over all workers.

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
        """How many pipelines there are, over all workers."""
        return self._num_input_pipelines

    @property
    def input_pipeline_id(self) -> int:
        """The number of this pipeline, from 0."""
        return self._input_pipeline_id

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas over all workers."""
        return self._num_replicas_in_sync

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the rows of one replica's batch.

        Args:
            global_batch_size: Rows of the batch of all replicas.

        Returns:
            `global_batch_size` divided by the number of replicas.

        Raises:
            ValueError: If the replicas do not divide it.

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
    """How often a dataset function is called.

    Attributes:
        PER_WORKER: Once; the replicas take turns in taking its elements.
        PER_REPLICA: Once for each replica, which takes all elements of its own.
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


class AutoShardPolicy(enum.Enum):
    """What a dataset that several workers read holds.

    Attributes:
        AUTO: What the options of a `tf.data.Dataset` say, or the sampler of a torch
            `DataLoader`; else the same as DATA.
        FILE: Global batches of files, of which each worker reads its own: a
            `tf.data.Dataset`, as tf.distribute shards it. Elsewhere, give each worker
            the files of `keras_strategy.files` and take OFF.
        DATA: The global batches, the same on every worker, which computes on its own
            rows of them. It reads those alone where the dataset can be indexed.
        OFF: Each worker's own rows. A global batch is what all workers give for a step,
            in the order of their ranks; each computes on what it gives. A worker whose
            data has ended goes on without rows.
        HINT: Global batches of a `tf.data.Dataset` that each worker's part replaces
            where it calls `shard` with `tf.data.experimental.SHARD_HINT`.
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
    """How a dataset is to be distributed.

    Who gives options has elements prefetched: they are read in a thread while the loop
    works on those before, for all kinds of data. Without options that is so where
    nobody can see it; `docs/distributed_input.md` says where that is.

    Attributes:
        experimental_fetch_to_device: Whether elements are prefetched to the
            replicas' devices rather than to the host. None means True. With several
            workers they are prefetched to the host.
        experimental_replication_mode: An `InputReplicationMode`. PER_REPLICA is for
            `distribute_datasets_from_function`.
        experimental_place_dataset_on_device: Whether the dataset itself runs on the
            replicas' devices; for PER_REPLICA without fetching to the device. It is
            for a `tf.data.Dataset` on TensorFlow.
        experimental_per_replica_buffer_size: How many elements are prefetched for
            each replica; 0 for none. An `IndexedDataset` has a `prefetch` of its own.
        auto_shard_policy: An `AutoShardPolicy`, for several workers. A `tf.data`
            dataset whose own options say another than AUTO needs none here.
        end_with_first_worker: Where workers read rows of their own, whether an epoch
            ends when the first of them has no more. If not, it ends with the last one,
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
        """Checks the options."""
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
        # `tf.distribute.InputReplicationMode` is an enum of the same names.
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
