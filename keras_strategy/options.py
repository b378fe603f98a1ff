"""Options of strategies, runs, datasets and workers, checked when created."""

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from keras_strategy.errors import UnsupportedBackendError, logger


class RunOptions(NamedTuple):
    """Options of `strategy.run`.

    Attributes:
        experimental_enable_dynamic_batch_size: Has no effect, as the next two: they are
            for TPUs under TensorFlow. A value other than the default is logged.
        experimental_bucketizing_dynamic_shape: Has no effect.
        experimental_xla_options: Has no effect.
        compile: False runs the function as Python on every call, which is slow but
            easy to debug; on JAX its control flow may then depend on the replica's id.
            None and True compile on TensorFlow, and on JAX with several replicas.
        whole: True calls the function once, on the rows of all replicas, as one device
            does: for a function that compares rows, or counts them. Distributed values
            among the arguments are concatenated, the result is one device's, and all
            replicas get what the function assigns. It runs as Python.

    Example:

    ```python
    import keras
    import keras_strategy as ks
    import numpy as np

    strategy = ks.MirroredStrategy()
    (batch,) = strategy.experimental_distribute_dataset([np.float32([1, 2, 6])])
    options = ks.RunOptions(whole=True)
    assert float(strategy.run(keras.ops.mean, args=(batch,), options=options)) == 3.0
    ```
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None
    compile: bool | None = None
    whole: bool = False


_DEFAULT = RunOptions()


def check_call(fn: Any, args: Any) -> None:
    """Raise unless `fn` is callable and `args` is a tuple or list."""
    if not callable(fn):
        raise TypeError(
            "Argument `fn` must be a function. "
            f"Received: fn={fn!r} of type {type(fn).__name__}"
        )
    if not isinstance(args, tuple | list):
        raise ValueError(
            "Argument `args` must be a tuple or list of positional arguments, "
            f"such as (x,). Received: args={args!r} of type {type(args).__name__}"
        )


def check_run_options(options: Any) -> RunOptions:
    """Return the options, or the default ones for None; raise if they are invalid."""
    if options is None:
        return _DEFAULT
    if not isinstance(options, RunOptions):
        raise TypeError(
            "Argument `options` of `run` must be a `keras_strategy.RunOptions` or "
            f"None. Received: options={options!r} of type {type(options).__name__}"
        )
    if options.compile not in (None, True, False):
        raise ValueError(
            "`RunOptions.compile` must be None, True or False. Received: "
            f"compile={options.compile!r}"
        )
    if not isinstance(options.whole, bool):
        raise ValueError(
            "`RunOptions.whole` must be True or False. Received: "
            f"whole={options.whole!r}"
        )
    if options[:3] != _DEFAULT[:3]:
        logger.info("The experimental options of %r have no effect here.", options)
    return options


GLOBAL, LOCAL = "global", "local"


def check_batch_statistics(batch_statistics: Any) -> str | None:
    """Return the argument, or raise ValueError."""
    if batch_statistics in (None, GLOBAL, LOCAL):
        return batch_statistics
    raise ValueError(
        "Argument `batch_statistics` must be 'global' or 'local', for the statistics "
        "of the global or the local batch, or None, for the global batch in `fit` and "
        f"the local one in `run`. Received: batch_statistics={batch_statistics!r}"
    )


def check_shard(shard: Any, engine: Any, cross_device_ops: Any = None) -> str | None:
    """Return the argument; raise if it is invalid, or unsupported by the backend."""
    if shard not in (None, "optimizer", "parameters"):
        raise ValueError(
            "Argument `shard` must be 'optimizer', to shard the optimizer's slots over "
            "the replicas, 'parameters', to shard the trainable weights as well, or "
            f"None, for a copy on each replica. Received: shard={shard!r}"
        )
    reason = None if shard is None else engine.sharding_unsupported_reason(shard)
    if reason is not None:
        raise UnsupportedBackendError(
            f"shard={shard!r} is not available with the Keras backend '{engine.name}': "
            f"{reason}"
        )
    is_custom = cross_device_ops is not None and cross_device_ops.has_custom_reduce
    if shard == "parameters" and engine.reduces_in_backward and is_custom:
        raise ValueError(
            "shard='parameters' reduces gradients in the backward pass, so it cannot "
            "use a `cross_device_ops` of your own. Omit one of the two, or use "
            f"shard='optimizer'. Received: cross_device_ops={cross_device_ops!r}"
        )
    return shard


def check_virtual_replicas(
    virtual_replicas: Any, engine: Any, shard: Any, cross_device_ops: Any = None
) -> int | None:
    """Return the argument; raise if it is invalid, or unsupported by the backend."""
    if virtual_replicas is None:
        return None
    received = f"Received: virtual_replicas={virtual_replicas!r}"
    is_int = isinstance(virtual_replicas, int) and not isinstance(
        virtual_replicas, bool
    )
    if not is_int or virtual_replicas < 1:
        raise ValueError(
            "Argument `virtual_replicas` must be a positive whole number, or None for "
            f"one replica on each device. {received}"
        )
    reason = engine.virtual_replicas_unsupported_reason()
    if reason is not None:
        raise UnsupportedBackendError(
            f"`virtual_replicas` is not available with the Keras backend "
            f"'{engine.name}': {reason}"
        )
    if shard is not None:
        raise ValueError(
            "`virtual_replicas` cannot be combined with `shard`: omit one of the two. "
            f"{received} and shard={shard!r}"
        )
    if cross_device_ops is not None and cross_device_ops.has_custom_reduce:
        raise ValueError(
            "`virtual_replicas` sums in an order of its own, so it cannot use a "
            f"`cross_device_ops` of yours. {received} and "
            f"cross_device_ops={cross_device_ops!r}"
        )
    return virtual_replicas


class CommunicationImplementation(enum.Enum):
    """Library that carries values between workers.

    Attributes:
        AUTO: NCCL between GPUs, otherwise the backend's library for CPUs.
        RING: The backend's library for CPUs: gloo on torch, gRPC on TensorFlow.
        NCCL: NVIDIA's NCCL, between GPUs only.

    Example:

    ```python
    import keras_strategy as ks

    auto = ks.experimental.CommunicationImplementation.AUTO
    assert ks.experimental.CommunicationImplementation("AUTO") is auto
    ```
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclass(frozen=True)
class CommunicationOptions:
    """Hints for the communication between workers.

    They change how long training takes, never its result.

    Args:
        bytes_per_pack: Maximum number of bytes of gradients in one collective; 0 lets
            the backend decide. Must be equal on all workers. Has an effect on
            TensorFlow; and on torch, where packs of whole gradients are then reduced
            during the backward pass, see [Several workers](several_workers.md), and
            sharded weights are gathered ahead, see [Larger models](larger_models.md).
        timeout_seconds: Seconds that workers wait for one that is alive but silent
            before all of them end. None uses the environment variable
            KERAS_STRATEGY_TIMEOUT_SECONDS, or else 600.
        implementation: A `CommunicationImplementation` or its name.
        interface: Name of this machine's network interface by which the others reach
            it, such as "eth0"; it may differ between workers. None uses the environment
            variable KERAS_STRATEGY_INTERFACE, or else the interface that connects to
            the chief.

    Raises:
        ValueError: If a value is invalid.

    Example:

    ```python
    import keras_strategy as ks

    options = ks.experimental.CommunicationOptions(timeout_seconds=120)
    strategy = ks.MultiWorkerMirroredStrategy(communication_options=options)
    ```
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO
    interface: str | None = None

    def __post_init__(self):
        if not isinstance(self.bytes_per_pack, int) or self.bytes_per_pack < 0:
            raise ValueError(
                "Argument `bytes_per_pack` must be 0 or a positive integer. Received: "
                f"bytes_per_pack={self.bytes_per_pack!r}"
            )
        timeout = self.timeout_seconds
        if timeout is not None and not (
            isinstance(timeout, int | float) and 0 < timeout < math.inf
        ):
            raise ValueError(
                "Argument `timeout_seconds` must be a positive number of seconds, or "
                f"None. Received: timeout_seconds={timeout!r}"
            )
        if self.interface is not None and not isinstance(self.interface, str):
            raise TypeError(
                "Argument `interface` must be the name of a network interface, or "
                f"None. Received: interface={self.interface!r}"
            )
        name = self.implementation
        # `tf.distribute`'s enum has the same names.
        name = name.name if isinstance(name, enum.Enum) else name
        members = CommunicationImplementation.__members__
        if not isinstance(name, str) or name.upper() not in members:
            raise ValueError(
                "Argument `implementation` must be a CommunicationImplementation or "
                f"one of {sorted(members)}. Received: "
                f"implementation={self.implementation!r}"
            )
        object.__setattr__(self, "implementation", members[name.upper()])


def check_communication_options(options: Any) -> CommunicationOptions:
    """Return the options, or the default ones for None; raise for another type."""
    if options is None:
        return CommunicationOptions()
    if not isinstance(options, CommunicationOptions):
        raise TypeError(
            "Communication options must be `ks.experimental.CommunicationOptions` or "
            f"None. Received: {options!r} of type {type(options).__name__}"
        )
    return options


# The slots are descriptors, so that a field exists on the class like a property.
@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
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

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the number of rows of one replica's batch.

        Args:
            global_batch_size: Rows of the global batch, a multiple of the replicas.

        Raises:
            ValueError: If it is not a multiple of the number of replicas.

        Example:

        ```python
        import keras_strategy as ks

        assert ks.InputContext(1, 0, 2).get_per_replica_batch_size(64) == 32
        ```
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise ValueError(
                "Argument `global_batch_size` must be a multiple of the "
                f"{self.num_replicas_in_sync} replicas. Received: "
                f"global_batch_size={global_batch_size}"
            )
        return global_batch_size // self.num_replicas_in_sync


class InputReplicationMode(enum.Enum):
    """Number of calls of a dataset function.

    Attributes:
        PER_WORKER: Once; the replicas take its elements in turn.
        PER_REPLICA: Once for each replica, which reads all elements of its dataset.

    Example:

    ```python
    import keras_strategy as ks

    mode = ks.InputReplicationMode.PER_REPLICA
    options = ks.InputOptions(experimental_replication_mode=mode)
    assert options.experimental_replication_mode is mode
    ```
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
        OFF: Each worker has its own rows, none if its data has ended. A global batch
            is the rows of all workers in a step, in rank order.
        HINT: Global batches of a `tf.data.Dataset` that calls `shard` with
            `tf.data.experimental.SHARD_HINT`, which is replaced by the worker's shard.

    Example:

    ```python
    import keras_strategy as ks

    policy = ks.experimental.AutoShardPolicy.OFF  # each worker its own rows
    options = ks.InputOptions(auto_shard_policy=policy)
    ```
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

    With options, a thread reads elements of all kinds of data while the loop computes.
    Without options, elements are prefetched only where that cannot be observed, see
    [Distributed input](distributed_input.md).

    Attributes:
        experimental_fetch_to_device: False to prefetch elements to the host; True or
            None to the replicas' devices. Several workers prefetch to the host.
        experimental_replication_mode: An `InputReplicationMode`. PER_REPLICA is for
            `distribute_datasets_from_function`.
        experimental_place_dataset_on_device: True to run the dataset itself on the
            replicas' devices; for PER_REPLICA without fetching to the device, with a
            `tf.data.Dataset` on TensorFlow.
        experimental_per_replica_buffer_size: Elements to prefetch for each replica; 0
            for none. An `IndexedDataset` has its own `prefetch`.
        auto_shard_policy: An `AutoShardPolicy`, for several workers. Not needed if the
            options of a `tf.data.Dataset` have a policy other than AUTO.
        end_with_first_worker: Where workers read their own rows, True to end an epoch
            when the first of them has no more; False to continue without rows there.

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


@dataclass(eq=False)
class TerminationConfig:
    """Detection of preemption, and the reaction to it.

    Args:
        termination_watcher_fn: Returns True if this worker is to end. Called once a
            second in a thread; must return at once. None takes SIGTERM as the notice.
        exit_fn: Ends the process after saving. None exits with code 75, with which
            `keras-strategy run --max-restarts` restarts it.
        grace_period: Seconds between the notice and the end. State is saved at once,
            and again shortly before the end. None, or 0, saves once and ends.
        save_fn: Saves instead of the default. Called on all workers, with the
            arguments of `save_checkpoint_if_preempted`.

    Example:

    ```python
    import pathlib

    import keras_strategy as ks

    notice = pathlib.Path("/run/this-machine-is-about-to-end")
    config = ks.experimental.TerminationConfig(
        termination_watcher_fn=notice.exists, grace_period=120
    )
    ```
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., Any] | None = None

    def __post_init__(self):
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise ValueError(
                    f"Argument `{name}` must be a function or None. Received: "
                    f"{name}={value!r}"
                )
        period = self.grace_period
        if period is not None and not (isinstance(period, int | float) and period >= 0):
            raise ValueError(
                "Argument `grace_period` must be a number of seconds, 0 or more, or "
                f"None. Received: grace_period={period!r}"
            )
