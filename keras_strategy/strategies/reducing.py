"""How a strategy combines the replicas' values where they are needed."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras

from keras_strategy.core import context
from keras_strategy.core.protocol import ReplicaGroup
from keras_strategy.core.registry import get_engine
from keras_strategy.options.communication import check_communication_options
from keras_strategy.rules import ownership
from keras_strategy.rules.own_sums import CustomReducer
from keras_strategy.values.devices import resolve_devices
from keras_strategy.values.distributed import (
    DistributedValues,
    Mirrored,
    ReduceOp,
    sum_of_copies_error,
)
from keras_strategy.values.topology import ReplicaTopology

if TYPE_CHECKING:
    from keras_strategy.core.strategy import Strategy


class ReductionMethods:
    """`reduce_to` and `batch_reduce_to`, for `StrategyExtended` to inherit."""

    _strategy: "Strategy"
    group: ReplicaGroup
    topology: ReplicaTopology
    custom_reducer: CustomReducer | None
    worker_devices: tuple[str, ...]
    variable_created_in_scope: Callable[[keras.Variable], bool]

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: Any = None,
    ) -> Any:
        """Combines the replicas' values elementwise, where they are needed.

        Args:
            reduce_op: A `ReduceOp` or its name in any case.
            value: A `PerReplica` value, or a variable with `synchronization="on_read"`.
                With `"mean"`, or with one replica, also one that is the same for all
                replicas.
            destinations: A variable or a distributed value, whose devices get the
                result, or a device's name.
            options: A `CommunicationOptions`, or None.

        Returns:
            A `Mirrored` value, which `update` takes as an argument. One tensor if
            `destinations` is on one device.

        Raises:
            ValueError: If `reduce_op` is not one, the value cannot be reduced or is of
                another strategy, with another number of components, or there is no such
                device.
            TypeError: If `destinations` is none of these.
            RuntimeError: Inside a function that `run` calls.

        Example:

        ```python
        import keras
        import keras_strategy as ks

        strategy = ks.MirroredStrategy()
        with strategy.scope():
            v = keras.Variable(0.0)
        ones = strategy.run(lambda: keras.ops.ones(()))
        total = strategy.extended.reduce_to("sum", ones, destinations=v)
        strategy.extended.update(v, lambda c, x: c.assign(x), args=(total,))
        assert int(v) == strategy.num_replicas_in_sync
        ```
        """
        op = ReduceOp.parse(reduce_op)
        check_communication_options(options)
        context.require_cross_replica(self._strategy, "reduce_to")
        place = self._destination(destinations)
        with self._strategy.scope():
            if isinstance(value, keras.Variable):
                value = ownership.cross_replica_value(self._strategy, "reduce_to", value)
            for given in (value, destinations):
                if isinstance(given, DistributedValues):
                    ownership.check_component_count(self.topology, "reduce_to", given)
            if isinstance(value, DistributedValues) and not isinstance(value, Mirrored):
                value = (self.custom_reducer or self.group).reduce(op, value, None)
            elif op is ReduceOp.SUM and self._strategy.num_replicas_in_sync > 1:
                raise sum_of_copies_error(value)
            elif isinstance(value, Mirrored):
                value = value.values[0]
            return place(value)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: Any = None,
    ) -> list[Any]:
        """Combines several values, as `reduce_to` does one.

        Args:
            reduce_op: A `ReduceOp` or its name in any case.
            value_destination_pairs: Pairs of a value and its destinations.
            options: A `CommunicationOptions`, or None.

        Returns:
            A list with the result for each pair.

        Raises:
            ValueError: If these are not pairs; or as `reduce_to` does.
            TypeError: As `reduce_to` does.
            RuntimeError: Inside a function that `run` calls.

        Example:

        ```python
        import keras
        import keras_strategy as ks

        strategy = ks.MirroredStrategy()
        ones = strategy.run(lambda: keras.ops.ones(()))
        pairs = [(ones, ones), (ones, strategy.extended.worker_devices[0])]
        mirrored, tensor = strategy.extended.batch_reduce_to("mean", pairs)
        assert float(tensor) == 1.0
        ```
        """
        context.require_cross_replica(self._strategy, "batch_reduce_to")
        pairs = list(value_destination_pairs)
        if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
            raise ValueError(
                "Argument `value_destination_pairs` must be pairs of a value and its "
                f"destinations. Received: value_destination_pairs={pairs!r}"
            )
        return [
            self.reduce_to(reduce_op, value, destinations, options)
            for value, destinations in pairs
        ]

    def _destination(self, destinations: Any) -> Callable[[Any], Any]:
        """What brings a combined value to `destinations`."""
        if isinstance(destinations, str):
            there_is = [
                *get_engine().list_devices(),
                *get_engine().list_devices("cpu"),
            ]
            there_is = list(dict.fromkeys([*self.worker_devices, *there_is]))
            (device,) = resolve_devices([destinations], there_is)
            return lambda value: get_engine().copy_to(value, device)
        distributed = isinstance(destinations, DistributedValues) or (
            isinstance(destinations, keras.Variable)
            and self.variable_created_in_scope(destinations)
        )
        if distributed and self._strategy.num_replicas_in_sync > 1:
            return self.group.mirror
        if (
            distributed
            or isinstance(destinations, keras.Variable)
            or get_engine().is_tensor(destinations)
        ):
            return keras.ops.convert_to_tensor
        raise TypeError(
            "Argument `destinations` must be a variable, a distributed value, a tensor "
            f"or a device's name. Received: destinations={destinations!r} of type "
            f"{type(destinations).__name__}"
        )
