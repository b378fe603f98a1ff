"""Native strategies that ours run on, with readable variables and initial shards.

In cross-replica context, `variable.value` is native tf.distribute's container of the
replicas' components. It takes part in computations as a tensor does, but it does not
convert to NumPy or Python numbers as a `tf.Variable` of one device does, and a
`tf.function` takes one container for another of the same shape.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.collective_all_reduce_strategy import (
    CollectiveAllReduceExtended,
)
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended
from tensorflow.python.distribute.values import (
    Mirrored,
    MirroredVariable,
    SyncOnReadVariable,
)

from keras_strategy.backends.tensorflow import connection
from keras_strategy.backends.tensorflow.collectives import TensorFlowWorkers
from keras_strategy.backends.tensorflow.connection import native_name
from keras_strategy.backends.tensorflow.cross_device_ops import divide, sum_values


class ObjectTraceType(tf.types.experimental.TraceType):
    """Trace type that specializes a `tf.function` on the identity of an argument."""

    def __init__(self, value: Any, placeholder: Any):
        self.value = value
        self._placeholder = placeholder

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, ObjectTraceType) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def is_subtype_of(self, other: Any) -> bool:
        return self == other

    def most_specific_common_supertype(self, others: Any) -> "ObjectTraceType | None":
        return self if all(self == other for other in others) else None

    def placeholder_value(self, placeholder_context: Any) -> Any:
        return self._placeholder

    def to_tensors(self, value: Any) -> list[Any]:
        return []

    def cast(self, value: Any, casting_context: Any) -> Any:
        return value


class _ReadableVariable:
    """Conversions that a `tf.Variable` of one device supports."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array(_tensor(self).__array__(), dtype=dtype)

    def __bool__(self) -> bool:
        return bool(_tensor(self))

    def __complex__(self) -> complex:
        return complex(_tensor(self))

    def __float__(self) -> float:
        return float(_tensor(self))

    def __int__(self) -> int:
        return int(_tensor(self))

    def __tf_tracing_type__(self, context: Any) -> ObjectTraceType:
        return ObjectTraceType(self, self)


def _tensor(variable: Any) -> Any:
    return tf.convert_to_tensor(variable)


class _ReadableMirrored(_ReadableVariable, MirroredVariable):
    pass


class _ReadableSyncOnRead(_ReadableVariable, SyncOnReadVariable):
    pass


_READABLE = {
    MirroredVariable: _ReadableMirrored,
    SyncOnReadVariable: _ReadableSyncOnRead,
}


# The base of the mixins: native strategy classes, which have no annotations.
_NativeExtended: Any = object


class ReadableVariablesMixin(_NativeExtended):
    """Native strategy whose variables convert to NumPy and Python numbers."""

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        variable = super()._create_variable(next_creator, **kwargs)
        # The native method has no parameter for the classes.
        variable.__class__ = _READABLE.get(type(variable), type(variable))
        return variable


class InitialShardsMixin(_NativeExtended):
    """Native strategy that can give each local replica an initial value of its own."""

    shards: Sequence[Any] | None = None

    @contextlib.contextmanager
    def initial_shards(self, shards: Sequence[Any]) -> Iterator[None]:
        """Context manager that creates a variable from one value for each replica."""
        self.shards = shards
        try:
            yield
        finally:
            self.shards = None

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: Any, primary_var: Any, **kwargs: Any
    ) -> Any:
        if self.shards is not None:
            return self.shards[replica_id]
        return super()._get_variable_creator_initial_value(
            replica_id, device, primary_var, **kwargs
        )


# Strategies of different sizes in one process abort each other's collectives if they
# share a key. The user's own native strategies start at 0. Multi-worker strategies have
# a range of their own, since only they are created by all workers alike.
_local_keys = itertools.count(100_000, 10_000)
_worker_keys = itertools.count(10_000_000, 10_000)


class NativeMirroredStrategy(tf.distribute.MirroredStrategy):
    """Native strategy over the devices of this process.

    `parameter_device`, if any, stores all variables.
    """

    def __init__(
        self,
        devices: Sequence[str],
        cross_device_ops: Any,
        parameter_device: str | None = None,
    ):
        self._collective_key_base = next(_local_keys)
        names = [native_name(device) for device in devices]
        # As MirroredStrategy.__init__ does, with our Extended class.
        extended = _MirroredExtended(self, names, cross_device_ops)
        if parameter_device is not None:
            extended.parameter_device = native_name(parameter_device)
        tf.distribute.Strategy.__init__(self, extended)


class _MirroredExtended(InitialShardsMixin, ReadableVariablesMixin, MirroredExtended):
    parameter_device: str | None = None

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        if self.parameter_device is not None and kwargs.get("colocate_with") is None:
            # One component for each replica, but all of them on one device.
            devices = (self.parameter_device,) * len(self._devices)
            kwargs["colocate_with"] = _Colocation(devices)
        return super()._create_variable(next_creator, **kwargs)


@dataclasses.dataclass(frozen=True)
class _Colocation:
    """The attribute that native tf.distribute reads of `colocate_with`."""

    _devices: tuple[str, ...]


class NativeMultiWorkerStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """Native strategy over the devices of all workers, of which it runs the local ones.

    Our collectives bypass it, because they must work in loops and compare shapes first.
    The user's native calls in a step go through it.
    """

    def __init__(self, devices: Sequence[str], workers: TensorFlowWorkers):
        self._collective_key_base = next(_worker_keys)
        # As MultiWorkerMirroredStrategy.__init__ does, with our Extended class.
        extended = _MultiWorkerExtended(self, devices, workers)
        tf.distribute.Strategy.__init__(self, extended)


class _MultiWorkerExtended(
    InitialShardsMixin, ReadableVariablesMixin, CollectiveAllReduceExtended
):
    # `connection.start` started the server, and our watchdog checks the workers.
    _std_server_started = True
    _enable_check_health = False

    def __init__(
        self, strategy: Any, devices: Sequence[str], workers: TensorFlowWorkers
    ):
        self._ks_devices, self._ks_workers = tuple(devices), workers
        options = workers.cluster.options
        native = tf.distribute.experimental
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({connection.JOB: list(workers.addresses)}),
            task_type=connection.JOB,
            task_id=workers.rank,
            rpc_layer="grpc",
        )
        super().__init__(
            strategy,
            resolver,
            native.CommunicationOptions(
                bytes_per_pack=options.bytes_per_pack,
                timeout_seconds=workers.timeout_seconds,
                implementation=native.CommunicationImplementation(
                    workers.implementation.value
                ),
            ),
        )

    def _initialize_local_devices(self, cluster_resolver, worker_device):
        # The native method supports a single CPU device.
        names = [f"{worker_device}{native_name(name)}" for name in self._ks_devices]
        return tuple(names), self._ks_devices[0].split(":")[0].upper()

    def _reduce_to(self, reduce_op, value, destinations, options):
        # Native tf.distribute reads an on_read variable by this, among others.
        replicas = self._container_strategy().num_replicas_in_sync
        mean = reduce_op is not tf.distribute.ReduceOp.SUM
        if not isinstance(destinations, str) or not hasattr(value, "values"):
            return super()._reduce_to(reduce_op, value, destinations, options)
        if isinstance(value, Mirrored):
            return super()._reduce_to(reduce_op, value, destinations, options)
        total = sum_values([tf.convert_to_tensor(part) for part in value.values])
        with self._ks_workers.collective_scope("tf.distribute.Strategy.reduce"):
            total = self._ks_workers.sum("tf.distribute.Strategy.reduce", total)
        return divide(total, replicas) if mean else total

    def _get_variable_creator_initial_value(
        self, replica_id, device, primary_var, **kwargs
    ):
        # The native method broadcasts only some dtypes, and a shape that another
        # worker does not have makes all later collectives fail.
        if replica_id > 0 or self.shards is not None:
            return super()._get_variable_creator_initial_value(
                replica_id, device, primary_var, **kwargs
            )

        def initial_value():
            value = kwargs["initial_value"]
            value = value() if callable(value) else value
            value: Any = getattr(value, "wrapped_value", value)  # of a checkpoint
            value = tf.convert_to_tensor(value, dtype=kwargs.get("dtype"))
            name = f"the first value of '{kwargs.get('name')}'"
            return self._ks_workers.broadcast(name, [value])[0]

        return initial_value
