"""The replicas of one strategy: native tf.distribute.MirroredStrategy, or its like.

Native tf.distribute mirrors the variables and calls a function once per replica, in
one thread each. The threads take turns, replica 0 first, and change over only where
all of them meet (`merge_call`). What this module adds is the context that our core
asks for, one compiled function per step, and checks before anything is combined.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from keras_strategy.backends.tensorflow import combine
from keras_strategy.backends.tensorflow.across import gather_of_workers, sum_of_workers
from keras_strategy.backends.tensorflow.compiled import CompiledRuns
from keras_strategy.backends.tensorflow.cross_device_ops import native_cross_device_ops
from keras_strategy.backends.tensorflow.devices import native_name
from keras_strategy.backends.tensorflow.native import LocalStrategy, WorkersStrategy
from keras_strategy.backends.tensorflow.refusals import explained
from keras_strategy.backends.tensorflow.replica import (
    Meeting,
    Peers,
    TensorFlowReplica,
    regrouped,
)
from keras_strategy.backends.tensorflow.rows import steps_of_rows
from keras_strategy.backends.tensorflow.sharing import part_of, together
from keras_strategy.backends.tensorflow.workers import TensorFlowWorkers
from keras_strategy.backends.threads.hooks_divisions import share_adopted
from keras_strategy.backends.threads.interrupt import interrupted_together
from keras_strategy.core import context
from keras_strategy.core.components import update_components
from keras_strategy.core.own_attributes import AttributesOfReplicas
from keras_strategy.core.registry import get_engine
from keras_strategy.core.replica_context import ReplicaContext
from keras_strategy.hooks.random import kept_generator
from keras_strategy.hooks.variables import byte_count, initialize, stored, stored_dtype
from keras_strategy.rules.aggregation import (
    is_on_read,
    local_parts_outside,
    part_outside,
)
from keras_strategy.rules.sharding import Shares, note_shares, shares_of
from keras_strategy.values.distributed import (
    DistributedValues,
    Mirrored,
    PerReplica,
    ReduceOp,
    select_replica,
)
from keras_strategy.values.topology import Topology

if TYPE_CHECKING:
    from keras_strategy.core.strategy import Strategy
    from keras_strategy.options.run import RunOptions
    from keras_strategy.rules.cross_device_ops import CrossDeviceOps


class TensorFlowGroup:
    """See `keras_strategy.core.protocol.ReplicaGroup`.

    Args:
        strategy: The strategy.
        devices: Canonical names of the local devices.
        cross_device_ops: How gradients and `all_reduce` add up, None for the engine's
            choice. Between workers it is always the engine's.
        workers: The processes that the replicas belong to, or None for this one alone.
    """

    def __init__(
        self,
        strategy: "Strategy",
        devices: tuple[str, ...],
        cross_device_ops: "CrossDeviceOps | None" = None,
        workers: TensorFlowWorkers | None = None,
    ):
        self.devices = devices
        self.strategy = strategy
        self.workers = workers
        self.topology = Topology(devices, workers)
        self.native: Any
        if workers is None:
            chosen = native_cross_device_ops(cross_device_ops, devices)
            self.native = LocalStrategy(devices, chosen, strategy.parameter_device)
        else:
            self.native = WorkersStrategy(devices, workers)
        self.peers = Peers(strategy, self.native, self.topology, workers)
        self._attributes = AttributesOfReplicas(len(devices), tf.is_tensor)
        self._compiled = CompiledRuns(self.call, self.peers)

    def scope(self):
        return self.native.scope()

    def adopt(self, variables: Sequence[Any]) -> None:
        with tf.init_scope(), self.scope():
            for variable in variables:
                value = stored(variable)
                if isinstance(value, tf.distribute.DistributedValues):
                    continue
                initialize(variable, lambda value=value: tf.convert_to_tensor(value))
                # Optimizers know the variables that they were built with by this id.
                self.components(variable)[0]._unique_id = value._unique_id
                if is_on_read(variable):
                    self.deal_out(variable)
                share_adopted(self.strategy, variable)

    def share(self, variable: Any, shares: Shares) -> None:
        """Leaves each replica its share of a variable that is initialized."""
        with tf.init_scope(), self.scope():
            whole = tf.convert_to_tensor(self.held(variable)[0])
            local = self.topology.local_replicas
            parts = [part_of(whole, shares, replica) for replica in local]
            with self.native.extended.beginning_with(parts):
                initialize(variable, lambda: parts[0])
        note_shares(variable, shares)

    def whole_of(self, variable: Any) -> Any:
        """The value of a variable that the replicas share.

        With several workers, all of them have to ask.
        """
        shares, name = shares_of(variable), f"the value of '{variable.path}'"
        assert shares is not None
        with self.calling(name), tf.device(native_name(self.devices[0])):
            parts = [[tf.convert_to_tensor(part)] for part in self.held(variable)]
            return together(parts, [shares], self.workers, name)[0]

    def take_first(self, variables: Sequence[Any]) -> int:
        # They have them when they are made; not if the chief restored others.
        if self.workers is None:
            return len(variables)
        values = [tf.convert_to_tensor(self.components(v)[0]) for v in variables]
        chiefs = self.workers.take_chiefs("the values of variables", values)
        for variable, value in zip(variables, chiefs, strict=False):
            for component in () if value is None else self.components(variable):
                component.assign(value)
        return len(chiefs)

    def around(
        self, model: Any, method: str, arguments: dict[str, Any]
    ) -> AbstractContextManager[Any]:
        return explained()

    def check_apply_outside_of_replicas(self) -> None:
        raise RuntimeError(
            "`optimizer.apply` was called outside the replicas of "
            f"{self.strategy!r}. Call it inside the function that "
            "`strategy.run` runs, where it sums the replicas' gradients."
        )

    def components(self, variable: Any) -> tuple[Any, ...]:
        if shares_of(variable) is not None:
            return (self.whole_of(variable),) * len(self.devices)
        return self.held(variable)

    def held(self, variable: Any) -> tuple[Any, ...]:
        """What each of this worker's replicas holds of a variable."""
        return tuple(self.native.experimental_local_results(stored(variable)))

    def bytes_of(self, variable: Any) -> tuple[int, ...]:
        central, shares = self.strategy.parameter_device, shares_of(variable)
        if shares is not None:
            size = np.dtype(stored_dtype(variable)).itemsize
            local = self.topology.local_replicas
            return tuple(size * shares.size_of(replica) for replica in local)
        if central is None:
            return (byte_count(variable),) * len(self.devices)
        copies = byte_count(variable) * len(self.devices)
        return tuple(copies if device == central else 0 for device in self.devices)

    def parts(self, variable: Any) -> PerReplica:
        return PerReplica(self.components(variable))

    def part_of_this_worker(self, variable: Any) -> Any:
        """What this worker adds to an on_read variable's value."""
        components = [tf.convert_to_tensor(c) for c in self.components(variable)]
        return part_outside(variable, components, self.topology, combine.add)

    def assign(self, variable: Any, value: Any) -> None:
        """Writes a value for all replicas, outside of them."""
        parts = local_parts_outside(variable, value, self.topology)
        self.assign_components(variable, parts)

    def deal_out(self, variable: Any) -> None:
        """Makes the replicas' parts of a first value, which each of them was given."""
        with tf.init_scope():
            value = tf.convert_to_tensor(self.components(variable)[0])
            self.assign(variable, value)

    def assign_components(self, variable: Any, values: Sequence[Any]) -> None:
        shares, local = shares_of(variable), self.topology.local_replicas
        for replica, component, value in zip(
            local, self.held(variable), values, strict=True
        ):
            if shares is not None:
                value = part_of(tf.convert_to_tensor(value), shares, replica)
            component.assign(tf.cast(value, component.dtype))

    def update(
        self, variable: Any, fn: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Any:
        return update_components(self, variable, fn, args, kwargs)

    def mirror(self, value: Any) -> Mirrored:
        return Mirrored([get_engine().copy_to(value, name) for name in self.devices])

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple,
        kwargs: dict,
        options: "RunOptions",
        scope: Callable[[], AbstractContextManager[Any]],
    ) -> Any:
        with scope():
            if options.compile is False:
                with self.calling("strategy.run"):
                    return self.call(fn, args, kwargs)
            if tf.inside_function() or tf.config.functions_run_eagerly():
                return self.call(fn, args, kwargs)
            with self.calling("strategy.run"):
                return self._compiled(fn, args, kwargs)

    def calling(self, name: str) -> AbstractContextManager[Any]:
        """See `TensorFlowWorkers.calling`; nothing without other workers."""
        if self.workers is None:
            return contextlib.nullcontext()
        return self.workers.calling(name)

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
        return self._in_turns(fn, args, kwargs)

    @tf.autograph.experimental.do_not_convert
    def _in_turns(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        policy, replicas = keras.config.dtype_policy(), len(self.devices)
        outputs: list[Any] = [None] * replicas
        own = self._attributes.begin()
        meeting = Meeting([None] * replicas, kept_generator(), own)
        threads: list[threading.Thread] = []
        of_workers = self.workers is not None
        steps = steps_of_rows(fn, args, kwargs, replicas, of_workers)

        @tf.autograph.experimental.do_not_convert
        def replica_fn(args, kwargs):
            keras.config.set_dtype_policy(policy)  # Keras keeps it per thread
            threads.append(threading.current_thread())
            replica = TensorFlowReplica(self.peers, meeting)
            if steps is not None:
                replica.step = steps[replica.index]
            with (
                context.replica_in_charge(ReplicaContext(self.strategy, replica)),
                own[replica.index].in_turn(),
            ):
                args, kwargs = select_replica((args, kwargs), replica.index, replicas)
                result = fn(*args, **kwargs)
                outputs[replica.index] = tree.map_structure(_read, result)

        try:
            with interrupted_together(threads):
                self.native.run(replica_fn, args=(args, kwargs))
        except Exception as error:
            if tf.executing_eagerly():
                error.add_note(
                    "The function was not compiled: what the replicas had assigned "
                    "to variables before this error stays assigned."
                )
            if "made a different number of replica_context().merge_call()" in str(
                error
            ):
                # An earlier replica's Python changes what a later one's finds.
                error.add_note(
                    "All replicas must take the same branches. They take turns, so "
                    "what an earlier one has built is built for the next one: build "
                    "layers and optimizers before `strategy.run`, or call them "
                    "without asking whether they are built."
                )
            raise
        self._attributes.commit(own)
        if meeting.drew:
            seeds = self.peers.seeds
            seeds.give_back(self.components(seeds.replicas.state)[0])
        return regrouped(outputs)

    def reduce(self, reduce_op: ReduceOp, value: DistributedValues, axis: Any) -> Any:
        with self.calling("strategy.reduce"), tf.device(native_name(self.devices[0])):
            return combine.reduce(
                reduce_op, value.values, axis, self.topology.num_replicas, self._of_all
            )

    def _of_all(self, total: Any) -> Any:
        if self.workers is None:
            return total
        return sum_of_workers(self.workers, "strategy.reduce", [total])[0]

    def gather(self, values: Sequence[Any], axis: int) -> Any:
        with self.calling("strategy.gather"), tf.device(native_name(self.devices[0])):
            joined = combine.gather(values, axis)
            if self.workers is None:
                return joined
            return gather_of_workers(self.workers, "strategy.gather", joined, axis)

    def place(self, parts: Sequence[Any], alike: bool | None = None) -> PerReplica:
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
