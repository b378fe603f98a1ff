"""The replicas of one strategy: a native tf.distribute.MirroredStrategy.

Native tf.distribute mirrors the variables and calls a function once per replica, in
one thread each. The threads take turns, replica 0 first, and change over only where
all of them meet (`merge_call`). What this module adds is the context that our core
asks for, one compiled function per step, and checks before anything is combined.
"""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from keras import tree

from keras_strategy import context
from keras_strategy.backends import get_backend
from keras_strategy.backends.tensorflow import combine
from keras_strategy.backends.tensorflow.compiled import CompiledRuns
from keras_strategy.backends.tensorflow.cross_device_ops import (
    native_cross_device_ops,
)
from keras_strategy.backends.tensorflow.devices import native_name
from keras_strategy.backends.tensorflow.replica import Meeting, TensorFlowReplica
from keras_strategy.updating import update_components
from keras_strategy.values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    ReduceOp,
    regroup,
    select_replica,
)

if TYPE_CHECKING:
    from keras_strategy.cross_device_ops import CrossDeviceOps
    from keras_strategy.options import RunOptions
    from keras_strategy.strategy import Strategy

# Strategies of different sizes in one process abort each other's collectives when
# they share a key; users' own native strategies start at 0.
_collective_keys = itertools.count(100_000, 10_000)


class _NativeStrategy(tf.distribute.MirroredStrategy):
    def __init__(self, devices, cross_device_ops):
        self._collective_key_base = next(_collective_keys)
        super().__init__(devices, cross_device_ops)


class TensorFlowGroup:
    """See `keras_strategy.backends.protocol.ReplicaGroup`.

    Args:
        strategy: The strategy.
        devices: Canonical names of two or more devices.
        cross_device_ops: How gradients and `all_reduce` add up, None for the engine's
            choice.
    """

    def __init__(
        self,
        strategy: "Strategy",
        devices: tuple[str, ...],
        cross_device_ops: "CrossDeviceOps | None" = None,
    ):
        self.devices = devices
        self.strategy = strategy
        self.native = _NativeStrategy(
            [native_name(device) for device in devices],
            native_cross_device_ops(cross_device_ops, devices),
        )
        self.seed_generator: keras.random.SeedGenerator | None = None
        self._compiled = CompiledRuns(self.call)

    def scope(self):
        return self.native.scope()

    def adopt(self, variables: Sequence[Any]) -> None:
        with tf.init_scope(), self.scope():
            for variable in variables:
                value = variable._value
                if isinstance(value, tf.distribute.DistributedValues):
                    continue
                variable._initialize(lambda value=value: tf.convert_to_tensor(value))
                # Optimizers know the variables that they were built with by this id.
                self.components(variable)[0]._unique_id = value._unique_id

    def take_first(self, variables: Sequence[Any]) -> None:
        """All variables are this process's."""

    def components(self, variable: Any) -> tuple[Any, ...]:
        return tuple(self.native.experimental_local_results(variable._value))

    def assign_components(self, variable: Any, values: Sequence[Any]) -> None:
        for component, value in zip(self.components(variable), values, strict=True):
            component.assign(value)

    def update(
        self, variable: Any, fn: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Any:
        return update_components(self, variable, fn, args, kwargs)

    def mirror(self, value: Any) -> Mirrored:
        return Mirrored([get_backend().copy_to(value, name) for name in self.devices])

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple,
        kwargs: dict,
        options: "RunOptions",
    ) -> Any:
        if options.compile is False:
            return self.call(fn, args, kwargs)
        if tf.inside_function() or tf.config.functions_run_eagerly():
            return self.call(fn, args, kwargs)
        return self._compiled(fn, args, kwargs)

    def call(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """`run` without a tf.function of its own.

        Args:
            fn: See `run`, as the others.
            args: Positional arguments.
            kwargs: Keyword arguments.
        """
        if isinstance(fn, tf.types.experimental.GenericFunction):
            # The replicas cannot meet inside a tf.function of each.
            fn = fn.python_function  # pyright: ignore[reportAttributeAccessIssue]
        fn = tf.__internal__.autograph.tf_convert(
            fn, tf.__internal__.autograph.control_status_ctx(), False
        )
        policy = keras.config.dtype_policy()
        outputs: list[Any] = [None] * len(self.devices)
        meeting = Meeting([None] * len(self.devices))

        @tf.autograph.experimental.do_not_convert
        def replica_fn(args, kwargs):
            keras.config.set_dtype_policy(policy)  # Keras keeps it per thread
            replica = TensorFlowReplica(self, meeting)
            with context.replica_in_charge(
                context.ReplicaContext(self.strategy, replica)
            ):
                args, kwargs = select_replica((args, kwargs), replica.id)
                result = fn(*args, **kwargs)
                outputs[replica.id] = tree.map_structure(_read, result)

        try:
            self.native.run(replica_fn, args=(args, kwargs))
        except Exception as error:
            if tf.executing_eagerly():
                error.add_note(
                    "The function was not compiled: what the replicas had assigned "
                    "to variables before this error stays assigned."
                )
            raise
        return regroup(outputs, tf.is_tensor)

    def beside_the_replicas(self, fn: Callable[[], Any]) -> Any:
        """Calls `fn` eagerly in the strategy's scope while the replicas wait.

        A variable that one replica's thread made there and then would have to be
        made by all of them at once. Here it exists on all devices when the first
        replica goes on, and the others find it.

        Args:
            fn: A function without arguments.

        Returns:
            What `fn` returns.
        """
        policy = keras.config.dtype_policy()

        def work():
            keras.config.set_dtype_policy(policy)
            with self.strategy.scope():
                return fn()

        with ThreadPoolExecutor(max_workers=1) as pool:
            return pool.submit(work).result()

    def reduce(self, reduce_op: ReduceOp, value: DistributedValues, axis: Any) -> Any:
        with tf.device(native_name(self.devices[0])):
            return combine.reduce(reduce_op, value.values, axis)

    def gather(self, values: Sequence[Any], axis: int) -> Any:
        with tf.device(native_name(self.devices[0])):
            return combine.gather(values, axis)

    def place(self, parts: Sequence[Any]) -> PerReplica:
        values = []
        for part, device in zip(parts, self.devices, strict=True):
            with tf.device(native_name(device)):
                if not tf.is_tensor(part):
                    # A constant copies its array; a converted one may share it.
                    part = tf.constant(part)
                values.append(tf.identity(part))
        return PerReplica(values)


def _read(value: Any) -> Any:
    """What a replica returns: the value of a variable, not the variable."""
    is_variable = isinstance(value, keras.Variable | tf.Variable)
    if is_variable or hasattr(value, "__array__") and not tf.is_tensor(value):
        return tf.convert_to_tensor(value)
    return value
