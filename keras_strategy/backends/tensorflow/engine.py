"""TensorFlow backend: native tf.distribute, made exact for Keras."""

import contextlib
import json
import operator
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import tensorflow as tf
from tensorflow.core.function import trace_type
from tensorflow.python.distribute.values import MirroredVariable
from tensorflow.python.eager import context

from keras_strategy.backends.tensorflow import (
    collectives,
    patches,
    patches_sharding,
    tensors,
    training,
)
from keras_strategy.backends.tensorflow.connection import native_name
from keras_strategy.backends.tensorflow.distributed_dataset import distribute
from keras_strategy.backends.tensorflow.group import TensorFlowGroup
from keras_strategy.backends.tensorflow.random import DRAW_FUNCTIONS
from keras_strategy.backends.tensorflow.variables import OVERRIDDEN
from keras_strategy.cluster.membership import Cluster
from keras_strategy.core.context import DryRun
from keras_strategy.core.protocols import Engine, Strategy
from keras_strategy.core.step_state import map_rows
from keras_strategy.data.distributed_dataset import DistributedDataset
from keras_strategy.devices import canonical_device
from keras_strategy.keras_patches import sharded_slots, sharded_updates
from keras_strategy.keras_patches.internals import stored_value
from keras_strategy.keras_patches.random import dry_running
from keras_strategy.keras_patches.variable_classes import check_overridden
from keras_strategy.options import InputOptions
from keras_strategy.training.cross_device_ops import CrossDeviceOps
from keras_strategy.training.random import EndOfDryRun
from keras_strategy.training.saving import raise_if_any_failed
from keras_strategy.values import DistributedValues, raise_not_a_tensor

# tf.distribute's name, so that its checkpoints are found.
_STEPS = "checkpointed_runs"


class ValuesSpec(tf.TypeSpec):
    """Type of distributed values as outputs of tf.functions."""

    # As tf.distribute's, they are composite tensors, so that `tf.nest` does not take
    # them apart.

    _classes: dict[str, type[DistributedValues]] = {}
    value_type: Any = property(lambda self: self._classes[self._name])
    _component_specs: Any = property(lambda self: self._specs)

    def __init__(self, name: str, *specs: Any):
        self._name, self._specs = name, specs

    def _serialize(self) -> Any:
        return self._name, *self._specs

    def _to_components(self, value: Any) -> Any:
        return value.values

    def _from_components(self, components: Any) -> Any:
        return self.value_type(components)

    @classmethod
    def from_value(cls, value: DistributedValues) -> "ValuesSpec":
        kind = getattr(value, "value_type", type(value))
        name = kind.__qualname__
        cls._classes[name] = kind

        def describe(x: Any) -> Any:  # a specification, in an input signature
            return x if isinstance(x, tf.TypeSpec) else tf.type_spec_from_value(x)

        return cls(name, *tf.nest.map_structure(describe, tuple(value.values)))


class ValuesType(tf.types.experimental.TraceType):
    """Type of distributed values as arguments of tf.functions, which may be numbers."""

    def __init__(self, cls: type[DistributedValues], values: Any):
        self._cls = getattr(cls, "value_type", cls)
        self._values = values  # the type of the tuple of them

    def is_subtype_of(self, other: Any) -> bool:
        return self._is_alike(other) and self._values.is_subtype_of(other._values)

    def most_specific_common_supertype(self, others: Any) -> "ValuesType | None":
        if not all(map(self._is_alike, others)):
            return None
        types = [other._values for other in others]
        values = self._values.most_specific_common_supertype(types)
        return None if values is None else ValuesType(self._cls, values)

    def placeholder_value(self, placeholder_context: Any) -> Any:
        return self._cls(self._values.placeholder_value(placeholder_context))

    def to_tensors(self, value: Any) -> Any:
        return self._values.to_tensors(value.values)

    def from_tensors(self, tensors: Any) -> Any:
        return self._cls(self._values.from_tensors(tensors))

    def flatten(self) -> Any:
        return self._values.flatten()

    def cast(self, value: Any, cast_context: Any) -> Any:
        values = self._values.cast(value.values, cast_context)
        return value if values is value.values else self._cls(values)

    def _is_alike(self, other: Any) -> bool:
        return isinstance(other, ValuesType) and self._cls is other._cls

    def __eq__(self, other: Any) -> bool:
        return self._is_alike(other) and self._values == other._values

    def __hash__(self) -> int:
        return hash((self._cls, self._values))


_protocol: Any = DistributedValues
_protocol._type_spec = property(ValuesSpec.from_value)
_protocol.__tf_tracing_type__ = lambda self, context: ValuesType(
    type(self), trace_type.from_value(self.values, context)
)
_protocol._convert_variables_to_tensors = lambda self: self
_protocol.__tf_tensor__ = raise_not_a_tensor
tf.__internal__.CompositeTensor.register(DistributedValues)


class TensorFlowEngine(Engine):
    name = "tensorflow"
    is_tensor = staticmethod(tf.is_tensor)
    is_tracing = staticmethod(tf.inside_function)
    connect: Any = staticmethod(collectives.connect)
    sum_values: Any = staticmethod(tensors.sum_values)
    divide: Any = staticmethod(tensors.divide)

    def list_devices(self, device_type: str | None = None) -> list[str]:
        if device_type is None:
            return self.list_devices("gpu") or self.list_devices("cpu")
        found = tf.config.list_logical_devices(device_type.upper())
        return [f"{device_type.lower()}:{index}" for index in range(len(found))]

    def sharding_unsupported_reason(self, shard: str) -> str | None:
        if shard == "optimizer":
            return None
        return (
            "native tf.distribute stores each trained variable in full on each device. "
            "shard='optimizer' shards the optimizer's slots; KERAS_BACKEND=torch and "
            "KERAS_BACKEND=jax also shard the parameters."
        )

    def logical_devices_unsupported_reason(self) -> str:
        return (
            "native TPUStrategy traces a step once for all replicas, but the exact "
            "results of this package need a trace for each replica with its rows. Use "
            "KERAS_BACKEND=jax; or `tf.distribute.TPUStrategy` itself, with which "
            "Keras trains without this package."
        )

    def set_logical_devices(self, device_type: str, count: int) -> None:
        kind = device_type.upper()
        physical = tf.config.list_physical_devices(kind)[0]
        logical = [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
        try:
            tf.config.set_logical_device_configuration(physical, logical)
            # Devices wait for each other's input in these threads. By default there is
            # one for each core: a machine with two cores can stop in native code.
            threads = tf.config.threading
            is_chosen = threads.get_inter_op_parallelism_threads()
            if not is_chosen and "TF_NUM_INTEROP_THREADS" not in os.environ:
                needed = max(os.cpu_count() or 1, 2 * count + 2)
                threads.set_inter_op_parallelism_threads(needed)
        except RuntimeError:
            initialized = len(tf.config.list_logical_devices(kind))
            if initialized == count:
                return
            raise RuntimeError(
                f"TensorFlow has already initialized {initialized} {device_type} "
                f"device(s), and cannot change this to {count}. Call "
                "`set_logical_devices` at the start of the program, before you create "
                "a tensor, a variable or a strategy. In a notebook, restart the kernel "
                "first."
            ) from None

    def device_scope(self, device: str) -> AbstractContextManager[Any]:
        return tf.device(native_name(device))

    def static_int(self, value: Any) -> int | None:
        if isinstance(value, int):
            return value
        static = tf.get_static_value(value)
        return None if static is None else int(static)

    def ones(self, shape: Sequence[Any], like: Any, order: None) -> Any:
        return tf.ones(shape, like.dtype)

    def draw_slice(
        self, name: str, given: dict[str, Any], begin: Any, seed: Callable[[], Any]
    ) -> Any:
        draw = DRAW_FUNCTIONS.get(name)
        return None if draw is None else draw(begin=begin, seed=seed(), **given)

    def dry_run(
        self, fn: Callable[..., Any], args: tuple, kwargs: dict, rows: int
    ) -> DryRun:
        def resize(x):
            if tf.executing_eagerly():
                return tf.gather(x, [row % x.shape[0] for row in range(rows)])
            if not isinstance(x, tf.Tensor):
                raise EndOfDryRun(f"the rows are in a {type(x).__name__}")
            return tf.compat.v1.placeholder(x.dtype, (rows, *x.shape[1:]))

        graph = contextlib.nullcontext()
        if not tf.executing_eagerly():
            # A graph that is never run has all shapes.
            graph = tf.__internal__.FuncGraph("dry_run").as_default()
        with dry_running() as trial, graph:
            args, kwargs = map_rows(resize, (args, kwargs))
            fn(*args, **kwargs)
        return trial

    def copy_to(self, value: Any, device: str) -> Any:
        with tf.device(native_name(device)):
            return tf.identity(value)

    def device_of(self, tensor: Any) -> str | None:
        # In a graph, TensorFlow may choose the device later.
        name = getattr(tensor, "device", "")
        return canonical_device(name) if name else None

    def value_and_grad(
        self, fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool
    ) -> Callable[..., Any]:
        def compute(*args, **kwargs):
            with tf.GradientTape() as tape:
                for variable in variables:
                    if not variable.trainable:
                        tape.watch(stored_value(variable))
                result = fn(*args, **kwargs)
                value, aux = result if has_aux else (result, None)
                value = tf.convert_to_tensor(value)
            if value.shape.rank not in (0, None):
                raise ValueError(
                    "The function passed to `value_and_grad` must return a scalar. "
                    f"Received a tensor of the shape {value.shape}."
                )
            sources = [_tape_source(variable) for variable in variables]
            gradients = tape.gradient(value, sources)
            return ((value, aux) if has_aux else value), gradients

        return compute

    make_step_function: Any = staticmethod(training.make_step_function)

    def patch_modules(self) -> Sequence[ModuleType]:
        check_overridden(OVERRIDDEN)
        return [patches, patches_sharding, sharded_slots, sharded_updates]

    def random_state(self, seeded: bool = True) -> bytes | None:
        if context.global_seed() is None:
            if not seeded:
                return None
            # Without a seed, operations draw theirs from the machine, which no other
            # worker can reproduce.
            tf.random.set_seed(int.from_bytes(os.urandom(4)))
        # The seed, and the state of the seeds that are drawn from it.
        state = context.global_seed(), context.context()._rng.getstate()
        return json.dumps(state).encode()

    def set_random_state(self, state: bytes) -> None:
        seed, (version, numbers, gauss) = json.loads(state)
        if context.global_seed() != seed:
            tf.random.set_seed(seed)
        context.context()._rng.setstate((version, tuple(numbers), gauss))

    def native_strategy(self, devices: tuple[str, ...]) -> Any:
        names = [native_name(device) for device in devices]
        return tf.distribute.MirroredStrategy(names)

    def native(self, name: str) -> Any:
        if name in ("ParameterServerStrategy", "Server"):
            from keras_strategy.backends.tensorflow import parameter_servers

            return getattr(parameter_servers, name)
        return operator.attrgetter(name)(tf.distribute)

    def native_components(self, value: Any, is_mirrored: bool = True) -> Any:
        is_native = isinstance(value, tf.distribute.DistributedValues)
        if is_native and (is_mirrored or not isinstance(value, MirroredVariable)):
            return tuple(value.values)
        return None

    def owns_native(self, variable: Any, native: Any = None) -> bool | None:
        if not isinstance(variable, tf.Variable):
            return None
        return getattr(variable, "distribute_strategy", None) is native

    def distribute_natively(
        self,
        strategy: Strategy,
        datasets: Sequence[Any],
        split: bool,
        options: InputOptions | None,
    ) -> DistributedDataset | None:
        if strategy.extended.cluster is not None and not split:
            return None
        return distribute(strategy, datasets, split, options)

    def checkpoints(self, thing: Any, folder: Any, cluster: Cluster | None) -> Any:
        if isinstance(thing, tf.train.CheckpointManager):
            return _TensorFlowCheckpoints(thing, thing, cluster)
        if not isinstance(thing, tf.train.Checkpoint):
            return None
        manager = tf.train.CheckpointManager(thing, os.fspath(folder), max_to_keep=1)
        writer = manager
        if cluster is not None and not cluster.is_chief:
            scratch = tempfile.TemporaryDirectory()
            writer = tf.train.CheckpointManager(thing, scratch.name, max_to_keep=1)
            writer.scratch = scratch  # removes the folder with the manager
        return _TensorFlowCheckpoints(manager, writer, cluster)

    def require_eager_loop(self) -> None:
        if tf.inside_function():
            raise RuntimeError(
                "A tf.function iterates over a distributed dataset that was not "
                "created from a tf.data.Dataset. The Python loop would be unrolled, "
                "and the data would become constants. Distribute a tf.data.Dataset, "
                "or move the loop out of the tf.function."
            )

    def create_group(
        self,
        strategy: Strategy,
        devices: tuple[str, ...],
        cross_device_ops: CrossDeviceOps | None,
        cluster: Cluster | None,
    ) -> TensorFlowGroup:
        connected = None if cluster is None else collectives.connect(cluster)
        return TensorFlowGroup(strategy, devices, cross_device_ops, connected)


def _tape_source(variable: Any) -> Any:
    """Return the tensor that a tape reads: in cross-replica context the first one."""
    value = stored_value(variable)
    is_mirrored = isinstance(value, tf.distribute.DistributedValues)
    if is_mirrored and tf.distribute.in_cross_replica_context():
        return tf.distribute.get_strategy().experimental_local_results(value)[0]
    return value


class _TensorFlowCheckpoints:
    """Checkpoints of `tf.train.CheckpointManager`s, which may save elsewhere."""

    # All workers save, because reading the variables may need all of them.

    def __init__(
        self,
        reader: tf.train.CheckpointManager,
        writer: tf.train.CheckpointManager,
        cluster: Cluster | None,
    ):
        self._reader, self._writer, self._cluster = reader, writer, cluster
        if not hasattr(reader.checkpoint, _STEPS):
            steps = tf.Variable(tf.zeros((), tf.int64), trainable=False, name=_STEPS)
            setattr(reader.checkpoint, _STEPS, steps)
        self._steps = getattr(reader.checkpoint, _STEPS)

    def restore_or_initialize(self) -> int:
        """Restore the last checkpoint, if any, and return its number of steps."""
        path = self._reader.restore_or_initialize()
        steps = int(self._steps.numpy())
        restored = [None if path is None else os.path.basename(path), steps]
        if self._cluster is not None:
            by_worker = self._cluster.exchange("what is restored", restored)
            if any(other != restored for other in by_worker):
                raise ValueError(
                    "All workers must restore the same checkpoint of "
                    f"{self._reader.directory}: "
                    f"{self._cluster.format_by_worker(by_worker)}."
                )
        return steps

    def save(self, steps: int, *args: Any, **kwargs: Any) -> None:
        self._steps.assign(steps)
        error: Exception | None = None
        try:
            self._writer.save(*args, **kwargs)
        except Exception as caught:
            error = caught
        if self._cluster is not None:
            raise_if_any_failed(self._cluster, "a checkpoint", error)
        elif error is not None:
            raise error
