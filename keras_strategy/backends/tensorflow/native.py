"""The native strategies underneath ours."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.collective_all_reduce_strategy import (
    CollectiveAllReduceExtended,
)
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended
from tensorflow.python.distribute.values import Mirrored

from keras_strategy.backends.tensorflow import combine, connection
from keras_strategy.backends.tensorflow.containers import BeginsWithParts, MakesReadable
from keras_strategy.backends.tensorflow.devices import native_name
from keras_strategy.backends.tensorflow.workers import TensorFlowWorkers

# Strategies of different sizes in one process abort each other's collectives when
# they share a key; users' own native strategies start at 0. Those of several workers
# have keys of their own, since only they are made by all workers alike.
_local_keys = itertools.count(100_000, 10_000)
_workers_keys = itertools.count(10_000_000, 10_000)


class LocalStrategy(tf.distribute.MirroredStrategy):
    """The devices of this process.

    Args:
        devices: Canonical names.
        cross_device_ops: The native object that reduces, or None.
        home: The device that keeps the variables; None where each replica's does.
    """

    def __init__(
        self, devices: Sequence[str], cross_device_ops: Any, home: str | None = None
    ):
        self._collective_key_base = next(_local_keys)
        names = [native_name(device) for device in devices]
        # What MirroredStrategy does, with our class in place of its own.
        extended = _LocalExtended(self, names, cross_device_ops)
        extended.home = None if home is None else native_name(home)
        tf.distribute.Strategy.__init__(self, extended)


class _LocalExtended(BeginsWithParts, MakesReadable, MirroredExtended):
    home: str | None = None

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        if self.home is not None and kwargs.get("colocate_with") is None:
            # Each replica's component, but all of them on one device.
            homes = (self.home,) * len(self._devices)
            kwargs["colocate_with"] = _Devices(homes)
        return super()._create_variable(next_creator, **kwargs)


@dataclasses.dataclass(frozen=True)
class _Devices:
    """What native tf.distribute looks at of a variable to put another beside it."""

    _devices: tuple[str, ...]


class WorkersStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """The devices of all workers, of which this process runs its own.

    Our collectives do not go through it: they must work in loops and compare shapes
    first. Users' own native calls in a step do.

    Args:
        devices: Canonical names of the local devices.
        workers: The workers, connected.
    """

    def __init__(self, devices: Sequence[str], workers: TensorFlowWorkers):
        self._collective_key_base = next(_workers_keys)
        # What MultiWorkerMirroredStrategy does, with our class in place of its own.
        extended = _WorkersExtended(self, devices, workers)
        tf.distribute.Strategy.__init__(self, extended)


class _WorkersExtended(BeginsWithParts, MakesReadable, CollectiveAllReduceExtended):
    # `connection.start` has done so, and `keras_strategy.workers` looks after peers.
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
        # The native method knows of one CPU device only.
        names = [f"{worker_device}{native_name(name)}" for name in self._ks_devices]
        return tuple(names), self._ks_devices[0].split(":")[0].upper()

    def _reduce_to(self, reduce_op, value, destinations, options):
        # So native tf.distribute reads an on_read variable, among others.
        replicas = self._container_strategy().num_replicas_in_sync
        mean = reduce_op is not tf.distribute.ReduceOp.SUM
        if not isinstance(destinations, str) or not hasattr(value, "values"):
            return super()._reduce_to(reduce_op, value, destinations, options)
        if isinstance(value, Mirrored):
            return super()._reduce_to(reduce_op, value, destinations, options)
        total = combine.add([tf.convert_to_tensor(part) for part in value.values])
        with self._ks_workers.calling("tf.distribute.Strategy.reduce"):
            total = self._ks_workers.sum("tf.distribute.Strategy.reduce", total)
        return combine.divide(total, replicas) if mean else total

    def _get_variable_creator_initial_value(
        self, replica_id, device, primary_var, **kwargs
    ):
        # The native method broadcasts some dtypes only, and a shape that another
        # worker does not have makes all later collectives fail.
        if replica_id > 0 or self.parts is not None:
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
