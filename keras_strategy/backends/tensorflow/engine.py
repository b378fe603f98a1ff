"""TensorFlow backend: native tf.distribute, made exact for Keras."""

import contextlib
import json
import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_strategy.backends.tensorflow import devices
from keras_strategy.backends.tensorflow.devices import native_name
from keras_strategy.hooks.rehearsal import rehearsing, with_rows
from keras_strategy.rules.draws import EndOfDryRun
from keras_strategy.values.devices import canonical_device
from keras_strategy.values.distributed import DistributedValues, raise_not_a_tensor

if TYPE_CHECKING:
    from keras_strategy.backends.tensorflow.group import TensorFlowGroup
    from keras_strategy.core.context import DryRun
    from keras_strategy.core.strategy import Strategy
    from keras_strategy.input.dataset import DistributedDataset
    from keras_strategy.options.input import InputOptions
    from keras_strategy.rules.cross_device_ops import CrossDeviceOps
    from keras_strategy.workers.cluster import Cluster


def _unflatten(cls: Any, metadata: Any, components: Sequence[Any]) -> Any:
    return cls(components)


# Lets tf.nest and tf.function see the tensors inside distributed values, so that the
# user's tf.functions take and return them.
_protocol: Any = DistributedValues
_protocol.__tf_flatten__ = lambda self: ((), self.values)
_protocol.__tf_unflatten__ = classmethod(_unflatten)
_protocol.__tf_tensor__ = raise_not_a_tensor


class TensorFlowEngine:
    """TensorFlow, see `keras_strategy.core.engine.Engine`."""

    name = "tensorflow"

    def list_devices(self, device_type: str | None = None) -> list[str]:
        return devices.list_devices(device_type)

    def sharding_unsupported_reason(self, shard: str) -> str | None:
        if shard == "optimizer":
            return None
        return (
            "native tf.distribute stores each trained variable in full on each device. "
            "shard='optimizer' shards the optimizer's slots; KERAS_BACKEND=jax also "
            "shards the parameters."
        )

    def logical_devices_unsupported_reason(self) -> str:
        return (
            "native TPUStrategy traces a step once for all replicas, but the exact "
            "results of this package need a trace for each replica with its rows. Use "
            "KERAS_BACKEND=jax; or `tf.distribute.TPUStrategy` itself, with which "
            "Keras trains without this package."
        )

    def tpu_coordinates(self) -> list[tuple[int, int, int, int]]:
        return []  # TPUStrategy is refused before it needs them

    def set_logical_devices(self, device_type: str, count: int) -> None:
        devices.set_logical_devices(device_type, count)

    def device_scope(self, device: str) -> AbstractContextManager[Any]:
        return tf.device(native_name(device))

    def is_tensor(self, value: Any) -> bool:
        return tf.is_tensor(value)

    def static_int(self, value: Any) -> int | None:
        if isinstance(value, int):
            return value
        static = tf.get_static_value(value)
        return None if static is None else int(static)

    def memory_order(self, x: Any) -> None:
        return None

    def ones(self, shape: Sequence[Any], like: Any, order: None) -> Any:
        return tf.ones(shape, like.dtype)

    def draw_slice(
        self, name: str, given: dict[str, Any], begin: Any, seed: Callable[[], Any]
    ) -> Any:
        from keras_strategy.backends.tensorflow.counted import DRAW_FUNCTIONS

        draw = DRAW_FUNCTIONS.get(name)
        return None if draw is None else draw(begin=begin, seed=seed(), **given)

    def dry_run(
        self, fn: Callable[..., Any], args: tuple, kwargs: dict, rows: int
    ) -> "DryRun":
        def resize(x):
            if tf.executing_eagerly():
                return tf.gather(x, [row % x.shape[0] for row in range(rows)])
            if not isinstance(x, tf.Tensor):
                raise EndOfDryRun(f"the rows are in a {type(x).__name__}")
            return tf.compat.v1.placeholder(x.dtype, (rows, *x.shape[1:]))

        graph = contextlib.nullcontext()
        if not tf.executing_eagerly():
            # A graph that is never run has all shapes.
            graph = tf.__internal__.FuncGraph("rehearsal").as_default()
        with rehearsing() as trial, graph:
            args, kwargs = with_rows(resize, (args, kwargs))
            fn(*args, **kwargs)
        return trial

    def gradient_variable_copies(
        self, variables: Sequence[Any], layers: Iterable[Any]
    ) -> contextlib.AbstractContextManager[list[tuple[Any, Any]]]:
        for layer in layers:
            for x in vars(layer).values():
                if isinstance(x, tf.Variable | tf.random.Generator):
                    raise EndOfDryRun(f"{layer.name} has a TensorFlow variable")
        return contextlib.nullcontext([])

    def copy_to(self, value: Any, device: str) -> Any:
        with tf.device(native_name(device)):
            return tf.identity(value)

    def device_of(self, tensor: Any) -> str | None:
        # In a graph, TensorFlow may choose the device later.
        name = getattr(tensor, "device", "")
        return canonical_device(name) if name else None

    def is_tracing(self) -> bool:
        return tf.inside_function()

    def value_and_grad(
        self, fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool
    ) -> Callable[..., Any]:
        from keras_strategy.backends.tensorflow.gradients import value_and_grad

        return value_and_grad(fn, variables, has_aux)

    def patch_modules(self) -> Sequence[ModuleType]:
        from keras_strategy.backends.tensorflow import (
            hooks,
            hooks_optimizers,
            hooks_sharding,
        )
        from keras_strategy.backends.threads import hooks_divisions, hooks_shares

        patches = [hooks, hooks_optimizers, hooks_sharding]
        return list(dict.fromkeys([*patches, hooks_divisions, hooks_shares]))

    def random_state(self, seeded: bool = True) -> bytes | None:
        from keras_strategy.backends.tensorflow import seeds

        if not (seeded or seeds.has_seed()):
            return None
        return json.dumps(seeds.random_state()).encode()

    def set_random_state(self, state: bytes) -> None:
        from keras_strategy.backends.tensorflow import seeds

        seed, (version, numbers, gauss) = json.loads(state)
        seeds.set_random_state(seed, (version, tuple(numbers), gauss))

    def native_strategy(self, devices: tuple[str, ...]) -> Any:
        names = [native_name(device) for device in devices]
        return tf.distribute.MirroredStrategy(names)

    def native(self, name: str) -> Any:
        if name == "ParameterServerStrategy":
            from keras_strategy.backends.tensorflow import parameter_servers

            return parameter_servers.ParameterServerStrategy
        return operator.attrgetter(name)(tf.distribute)

    def native_components(self, value: Any) -> tuple[Any, ...] | None:
        is_native = isinstance(value, tf.distribute.DistributedValues)
        return tuple(value.values) if is_native else None

    def distribute_natively(
        self,
        strategy: "Strategy",
        datasets: Sequence[Any],
        split: bool,
        options: "InputOptions | None",
    ) -> "DistributedDataset | None":
        if not all(isinstance(dataset, tf.data.Dataset) for dataset in datasets):
            return None
        if strategy.extended.cluster is not None and not split:
            return None
        from keras_strategy.backends.tensorflow.datasets import distribute

        return distribute(strategy, datasets, split, options)

    def checkpoints(self, thing: Any, folder: Any, cluster: "Cluster | None") -> Any:
        from keras_strategy.backends.tensorflow.checkpoints import checkpoints

        return checkpoints(thing, folder, cluster)

    def count_operations(self, train: Any, steps: int) -> tuple[int, int, int, int]:
        from keras_strategy.backends.tensorflow import counting

        return counting.count(train, steps)

    def compute_and_comm_fractions(self, train: Any, steps: int) -> None:
        return None  # TensorFlow's profiler writes for TensorBoard only

    def require_eager_loop(self) -> None:
        if tf.inside_function():
            raise RuntimeError(
                "A tf.function iterates over a distributed dataset that was not "
                "created from a tf.data.Dataset. The Python loop would be unrolled, "
                "and the data would become constants. Distribute a tf.data.Dataset, "
                "or move the loop out of the tf.function."
            )

    def connect(self, cluster: "Cluster") -> None:
        from keras_strategy.backends.tensorflow import workers

        workers.connect(cluster)

    def create_group(
        self,
        strategy: "Strategy",
        devices: tuple[str, ...],
        cross_device_ops: "CrossDeviceOps | None",
        cluster: "Cluster | None",
    ) -> "TensorFlowGroup":
        from keras_strategy.backends.tensorflow import workers
        from keras_strategy.backends.tensorflow.group import TensorFlowGroup

        connected = None if cluster is None else workers.connect(cluster)
        return TensorFlowGroup(strategy, devices, cross_device_ops, connected)
