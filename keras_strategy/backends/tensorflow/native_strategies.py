"""Native strategies that ours run on, with readable variables and initial shards.

In cross-replica context, `variable.value` is native tf.distribute's container of the
replicas' components. It takes part in computations as a tensor does, but it does not
convert to NumPy or Python numbers as a `tf.Variable` of one device does, and a
`tf.function` takes one container for another of the same shape.
"""

import itertools
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.function.trace_type.default_types import Literal
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
from keras_strategy.backends.tensorflow.tensors import divide, sum_values
from keras_strategy.core.registry import get_engine
from keras_strategy.devices import resolve_devices
from keras_strategy.training import cross_device_ops as choices
from keras_strategy.training.compile_cache import IdentityKey


class _ObjectTraceType(Literal):
    """Trace type that specializes a `tf.function` on the identity of an argument."""

    def __init__(self, value: Any):
        super().__init__(IdentityKey(value))

    def placeholder_value(self, placeholder_context: Any) -> Any:
        return self.value.it

    def cast(self, value: Any, casting_context: Any) -> Any:
        return value


# The base of mixins: a native class, which has no annotations.
_Native: Any = object


class _ReadableVariable(_Native):
    """Conversions that a `tf.Variable` of one device supports."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array(tf.convert_to_tensor(self).__array__(), dtype=dtype)

    def __bool__(self) -> bool:
        return bool(tf.convert_to_tensor(self))

    def __complex__(self) -> complex:
        return complex(tf.convert_to_tensor(self))

    def __float__(self) -> float:
        return float(tf.convert_to_tensor(self))

    def __int__(self) -> int:
        return int(tf.convert_to_tensor(self))

    def __tf_tracing_type__(self, context: Any) -> _ObjectTraceType:
        return _ObjectTraceType(self)


_READABLE = {
    native: type(f"Readable{native.__name__}", (_ReadableVariable, native), {})
    for native in (MirroredVariable, SyncOnReadVariable)
}


def _as_destination(value: Any) -> Any:
    """Return a place to reduce to, of which native tf.distribute takes the `bool`."""
    return Mirrored(value.values) if isinstance(value, _ReadableVariable) else value


class _VariablesMixin(_Native):
    """Native strategy with readable variables and initial shards."""

    # The next variable's initial value on each local replica; None if they are equal.
    shards: Sequence[Any] | None = None

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        variable = super()._create_variable(next_creator, **kwargs)
        # The native method has no parameter for the classes.
        variable.__class__ = _READABLE.get(type(variable), type(variable))
        return variable

    def _reduce_to(
        self, reduce_op: Any, value: Any, destinations: Any, options: Any
    ) -> Any:
        destinations = _as_destination(destinations)
        return super()._reduce_to(reduce_op, value, destinations, options)

    def _batch_reduce_to(self, reduce_op: Any, pairs: Any, options: Any) -> Any:
        pairs = [(value, _as_destination(place)) for value, place in pairs]
        return super()._batch_reduce_to(reduce_op, pairs, options)

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


def _native_cross_device_ops(
    choice: choices.CrossDeviceOps | None, devices: Sequence[str]
) -> Any:
    """Return native tf.distribute's class for the user's choice, or None."""
    on_cpu = all(device.startswith("cpu:") for device in devices)
    if choice is None:
        # On CPUs, collectives cost more than they save, and they do not work in the
        # loop of steps_per_execution.
        return tf.distribute.ReductionToOneDevice() if on_cpu else None
    if isinstance(choice, choices.ReductionToOneDevice):
        device = choice.reduce_to_device
        if device is not None:
            engine = get_engine()
            available = [*engine.list_devices(), *engine.list_devices("cpu")]
            device = native_name(resolve_devices([device], available)[0])
        return tf.distribute.ReductionToOneDevice(device)
    if isinstance(choice, choices.NcclAllReduce):
        if on_cpu:
            raise ValueError(
                "NcclAllReduce needs GPUs. Omit `cross_device_ops` to let TensorFlow "
                f"choose. Received: cross_device_ops={choice!r} for the devices "
                f"{list(devices)}"
            )
        return tf.distribute.NcclAllReduce(choice.num_packs)
    assert isinstance(choice, choices.HierarchicalCopyAllReduce)
    return tf.distribute.HierarchicalCopyAllReduce(choice.num_packs)


class NativeMirroredStrategy(tf.distribute.MirroredStrategy):
    # `parameter_device`, if any, stores all variables.

    def __init__(
        self,
        devices: Sequence[str],
        cross_device_ops: choices.CrossDeviceOps | None,
        parameter_device: str | None,
    ):
        self._collective_key_base = next(_local_keys)
        names = [native_name(device) for device in devices]
        # As MirroredStrategy.__init__ does, with our Extended class.
        chosen = _native_cross_device_ops(cross_device_ops, devices)
        extended = _MirroredExtended(self, names, chosen)
        if parameter_device is not None:
            extended.parameter_device = native_name(parameter_device)
        tf.distribute.Strategy.__init__(self, extended)


class _MirroredExtended(_VariablesMixin, MirroredExtended):
    parameter_device: str | None = None

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        if self.parameter_device is not None and kwargs.get("colocate_with") is None:
            # One component for each replica, but all of them on one device. Native
            # tf.distribute reads no other attribute of `colocate_with`.
            devices = (self.parameter_device,) * len(self._devices)
            kwargs["colocate_with"] = types.SimpleNamespace(_devices=devices)
        return super()._create_variable(next_creator, **kwargs)


class NativeMultiWorkerStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """Native strategy over all workers' devices, of which it runs the local ones."""

    # Our collectives bypass it, because they must work in loops and compare shapes
    # first. The user's native calls in a step go through it.

    def __init__(self, devices: Sequence[str], workers: TensorFlowWorkers):
        self._collective_key_base = next(_worker_keys)
        # As MultiWorkerMirroredStrategy.__init__ does, with our Extended class.
        extended = _MultiWorkerExtended(self, devices, workers)
        tf.distribute.Strategy.__init__(self, extended)


class _MultiWorkerExtended(_VariablesMixin, CollectiveAllReduceExtended):
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
        is_per_replica = hasattr(value, "values") and not isinstance(value, Mirrored)
        if not isinstance(destinations, str) or not is_per_replica:
            return super()._reduce_to(reduce_op, value, destinations, options)
        total = sum_values([tf.convert_to_tensor(part) for part in value.values])
        total = self._ks_workers.sum("tf.distribute.Strategy.reduce", total)
        if reduce_op is tf.distribute.ReduceOp.SUM:
            return total
        return divide(total, self._container_strategy().num_replicas_in_sync)

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
