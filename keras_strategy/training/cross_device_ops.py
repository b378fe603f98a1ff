"""Reductions over devices: the user's choice of an algorithm, or the user's own.

The backend implements a mere choice with its own, faster collectives. The strategy
calls an overridden `reduce_implementation` or `accumulation_fn` through
`CustomReducer`, for gradients, `all_reduce` and `reduce` of the user's code. Internal
sums (row counts, metric state) stay with the backend: a lossy reduction must not change
them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from keras_strategy.core import context
from keras_strategy.core.protocols import Replica
from keras_strategy.core.registry import get_engine
from keras_strategy.devices import canonical_device
from keras_strategy.errors import logger
from keras_strategy.options import CommunicationOptions, check_communication_options
from keras_strategy.training.ownership import distribute_native
from keras_strategy.training.reduction import (
    axes_to_reduce,
    cast_for_sum,
    check_same_dtype,
    is_float,
    num_entries,
)
from keras_strategy.training.row_weights import apply_row_weight
from keras_strategy.values import DistributedValues, Mirrored, PerReplica, ReduceOp


def destination_devices(destinations: Any) -> list[str | None]:
    """Return the destinations' devices, None where the program decides."""
    if isinstance(destinations, str):
        return [canonical_device(destinations)]
    destinations = distribute_native(destinations)
    if isinstance(destinations, keras.Variable):
        parts = context.get_strategy().experimental_local_results(destinations)
    elif isinstance(destinations, DistributedValues):
        parts = destinations.values
    elif get_engine().is_tensor(destinations):
        parts = [destinations]
    else:
        raise TypeError(
            "Argument `destinations` must be a variable, a distributed value, a tensor "
            f"or a device's name. Received: destinations={destinations!r} of type "
            f"{type(destinations).__name__}"
        )
    return [get_engine().device_of(part) for part in parts]


def check_pairs(value_destination_pairs: Any) -> list[Any]:
    """Return pairs of a value and its destinations as a list."""
    pairs = list(value_destination_pairs)
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise ValueError(
            "Argument `value_destination_pairs` must be pairs of a value and its "
            f"destinations. Received: value_destination_pairs={pairs!r}"
        )
    return pairs


class CrossDeviceOps:
    """Reduction of gradients, `all_reduce` and `reduce` over a strategy's devices.

    Pass a subclass that overrides `reduce_implementation` to `MirroredStrategy`, for
    example to compress gradients, to log them, or to sum in another order. The strategy
    calls it in cross-replica context, once for all replicas. On JAX and TensorFlow it
    runs while a step is compiled, so its Python runs once for each compiled step. The
    values are on the replicas' devices; `self.broadcast(value, values[0])` copies one
    to the first.

    Example:

    ```python
    import keras
    import keras_strategy as ks

    class HalfPrecision(ks.ReductionToOneDevice):
        def reduce_implementation(self, reduce_op, per_replica_value, *args):
            halves = [keras.ops.cast(v, "bfloat16") for v in per_replica_value.values]
            halves = ks.PerReplica([keras.ops.cast(v, "float32") for v in halves])
            return super().reduce_implementation(reduce_op, halves, *args)

    value = ks.PerReplica([keras.ops.ones(2), keras.ops.ones(2)])
    total = HalfPrecision().reduce("sum", value, destinations="cpu:0")
    assert float(total[0]) == 2.0
    ```
    """

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce the replicas' values to destinations.

        Args:
            reduce_op: A `ReduceOp` or its name.
            per_replica_value: A `PerReplica` of tensors, or a tensor.
            destinations: The result's destinations: a variable, a distributed value, a
                tensor or a device name.
            options: A `CommunicationOptions`, or None.

        Returns:
            A `Mirrored` value with a component for each destination. With one
            destination, a tensor.

        Raises:
            ValueError: If `reduce_op` is unknown.
            TypeError: If `destinations` are invalid.
        """
        operation = ReduceOp.parse(reduce_op)
        options = check_communication_options(options)
        destination_devices(destinations)  # an error if they are invalid
        value = _per_replica(per_replica_value)
        return self.reduce_implementation(operation, value, destinations, options)

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce several values, each as `reduce` does.

        Args:
            reduce_op: A `ReduceOp` or its name.
            value_destination_pairs: Pairs of a value and its destinations.
            options: A `CommunicationOptions`, or None.

        Returns:
            A list with the result of `reduce` for each pair.

        Raises:
            ValueError: If `reduce_op` is unknown, or an item is not a pair.
            TypeError: If destinations are invalid.
        """
        operation = ReduceOp.parse(reduce_op)
        options = check_communication_options(options)
        pairs = check_pairs(value_destination_pairs)
        for _, destinations in pairs:
            destination_devices(destinations)
        pairs = [(_per_replica(value), where) for value, where in pairs]
        return list(self.batch_reduce_implementation(operation, pairs, options))

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Copy a tensor to destinations.

        Args:
            tensor: A tensor on any device.
            destinations: As for `reduce`.

        Returns:
            A `Mirrored` value with a component for each destination. With one
            destination, a tensor.

        Raises:
            TypeError: If `destinations` are invalid.
        """
        destination_devices(destinations)
        return self.broadcast_implementation(tensor, destinations)

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Any:
        """Implement `reduce`; override this in a subclass.

        Args:
            reduce_op: A `ReduceOp`.
            per_replica_value: A `PerReplica` of tensors.
            destinations: As for `reduce`.
            options: A `CommunicationOptions`.

        Returns:
            A `Mirrored` value or tensor, as `broadcast` returns it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must have a `reduce_implementation`."
        )

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Implement `batch_reduce`; by default with `reduce_implementation`.

        Args:
            reduce_op: A `ReduceOp`.
            value_destination_pairs: Pairs of a `PerReplica` and its destinations.
            options: A `CommunicationOptions`.

        Returns:
            A list with the result of `reduce` for each pair.
        """
        return [
            self.reduce_implementation(reduce_op, value, destinations, options)
            for value, destinations in value_destination_pairs
        ]

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Implement `broadcast`; by default with plain copies.

        Args:
            tensor: A tensor on any device.
            destinations: As for `reduce`.

        Returns:
            A `Mirrored` value with a component for each destination. With one
            destination, a tensor.
        """
        copy_to = get_engine().copy_to
        copies = [
            tensor if place is None else copy_to(tensor, place)
            for place in destination_devices(destinations)
        ]
        return copies[0] if len(copies) == 1 else Mirrored(copies)

    @property
    def has_custom_reduce(self) -> bool:
        """True if sums may differ from the backend's own."""
        is_builtin = type(self) in BUILTIN_OPS
        return not is_builtin or getattr(self, "accumulation_fn", None) is not None

    def log_no_effect(self, where: str) -> None:
        """Log that a backend ignores this choice.

        Args:
            where: The backend's name, such as `"JAX"`.
        """
        logger.info(
            "cross_device_ops=%r has no effect on %s, which chooses its own "
            "collectives.",
            self,
            where,
        )


class _ReductionOnDevice(CrossDeviceOps):
    reduce_to_device: str | None = None
    accumulation_fn: Callable[[Any], Any] | None = None

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Any:
        """Implement `reduce`, see `CrossDeviceOps`."""
        engine = get_engine()
        values = [cast_for_sum(value) for value in per_replica_value.values]
        check_same_dtype(values)
        place = self.reduce_to_device or destination_devices(destinations)[0]
        if place is not None:  # None: the program decides
            values = [engine.copy_to(value, place) for value in values]
        total = engine.sum_values(values, self.accumulation_fn)
        if reduce_op is ReduceOp.MEAN:
            total = engine.divide(total, len(values))
        return self.broadcast(total, destinations)


class ReductionToOneDevice(_ReductionOnDevice):
    """Copies the values to one device, adds them there, and copies the sum back.

    Args:
        reduce_to_device: The device name; None for the first destination.
        accumulation_fn: Adds a list of tensors, as `tf.add_n`; None for a plain sum.

    Raises:
        ValueError: If `reduce_to_device` is not the name of a device.
        TypeError: If `accumulation_fn` is not callable.

    Example:

    ```python
    import keras_strategy as ks

    strategy = ks.MirroredStrategy(cross_device_ops=ks.ReductionToOneDevice())
    ```
    """

    def __init__(
        self,
        reduce_to_device: str | None = None,
        accumulation_fn: Callable[[Any], Any] | None = None,
    ):
        if reduce_to_device is not None:
            reduce_to_device = canonical_device(reduce_to_device)
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise TypeError(
                "Argument `accumulation_fn` must be None or a function of a list of "
                f"tensors. Received: accumulation_fn={accumulation_fn!r}"
            )
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = accumulation_fn

    def __repr__(self) -> str:
        return f"{type(self).__name__}(reduce_to_device={self.reduce_to_device!r})"


class _PackedAllReduce(_ReductionOnDevice):
    def __init__(self, num_packs: int = 1):
        if isinstance(num_packs, bool) or not isinstance(num_packs, int):
            raise TypeError(
                "Argument `num_packs` must be an integer. Received: "
                f"num_packs={num_packs!r} of type {type(num_packs).__name__}"
            )
        if num_packs < 0:
            raise ValueError(
                "Argument `num_packs` must be 0 (no packing) or more. Received: "
                f"num_packs={num_packs}"
            )
        self.num_packs = num_packs

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_packs={self.num_packs})"


class NcclAllReduce(_PackedAllReduce):
    """NVIDIA's NCCL collectives.

    TensorFlow needs GPUs for them. JAX and torch choose their collectives themselves.

    Args:
        num_packs: The number of packs into which values are concatenated for
            communication; 0 for none. It affects TensorFlow only.

    Raises:
        TypeError: If `num_packs` is not an integer.
        ValueError: If `num_packs` is negative.

    Example:

    ```python
    import keras_strategy as ks

    assert ks.NcclAllReduce(num_packs=2).num_packs == 2
    ```
    """


class HierarchicalCopyAllReduce(_PackedAllReduce):
    """Reduces within groups of neighbouring GPUs, then over the groups.

    It was designed for machines with eight GPUs, such as the DGX-1. JAX and torch
    choose their collectives themselves.

    Args:
        num_packs: The number of packs into which values are concatenated for
            communication; 0 for none. It affects TensorFlow only.

    Raises:
        TypeError: If `num_packs` is not an integer.
        ValueError: If `num_packs` is negative.

    Example:

    ```python
    import keras_strategy as ks

    strategy = ks.MirroredStrategy(cross_device_ops=ks.HierarchicalCopyAllReduce())
    ```
    """


BUILTIN_OPS = (ReductionToOneDevice, NcclAllReduce, HierarchicalCopyAllReduce)


def check_cross_device_ops(cross_device_ops: Any) -> None:
    """Raise `TypeError` unless the argument is None or a usable `CrossDeviceOps`."""
    if cross_device_ops is None:
        return
    abstract = CrossDeviceOps.reduce_implementation
    is_ops = isinstance(cross_device_ops, CrossDeviceOps)
    if not is_ops or type(cross_device_ops).reduce_implementation is abstract:
        names = ", ".join(kind.__name__ for kind in BUILTIN_OPS)
        raise TypeError(
            f"Argument `cross_device_ops` must be None, a {names} of this package, or "
            "of a subclass of its `CrossDeviceOps` with a `reduce_implementation`. "
            f"Received: cross_device_ops={cross_device_ops!r} of type "
            f"{type(cross_device_ops).__name__}"
        )
    if hasattr(cross_device_ops, "_gather_implementation"):
        raise TypeError(
            f"`_gather_implementation` of {type(cross_device_ops).__name__} would not "
            "be called: the backend gathers, and tf.distribute has no public method to "
            "override it. Remove it; `gather` and `all_gather` concatenate the values "
            "unchanged."
        )


def _per_replica(value: Any) -> PerReplica:
    value = distribute_native(value)
    if isinstance(value, DistributedValues):
        # Values of a traced function are gathered at each access of `values`.
        return PerReplica(value.values)
    return PerReplica([keras.ops.convert_to_tensor(value)])


class CustomReducer:
    """Reductions of a strategy with custom `CrossDeviceOps`."""

    def __init__(self, cross_device_ops: CrossDeviceOps):
        self._ops = cross_device_ops

    def weighted_sum(
        self, replica: Replica, tensors: Sequence[Any], weight: Any
    ) -> list[Any]:
        tensors = [ops.convert_to_tensor(tensor) for tensor in tensors]
        return self._sums(replica, [apply_row_weight(t, weight) for t in tensors])

    def all_reduce(self, replica: Replica, reduce_op: ReduceOp, value: Any) -> Any:
        """Implement `Replica.all_reduce`, with the gradient of the backend's sum."""
        tensor = cast_for_sum(value)
        constant = ops.stop_gradient(tensor)
        (total,) = self._sums(replica, [constant])
        if is_float(tensor) and not hasattr(tensor, "dense_shape"):  # it is not sparse
            # A sum of zeros contributes the gradient of the backend's sum.
            zeros = ops.where(ops.isfinite(constant), tensor - constant, 0)
            total = total + replica.all_reduce(ReduceOp.SUM, zeros)
        if reduce_op is ReduceOp.SUM:
            return total
        replicas = context.get_strategy().extended.topology.num_replicas
        return get_engine().divide(total, replicas)

    def _sums(self, replica: Replica, tensors: Sequence[Any]) -> list[Any]:
        def merge(_, operations, *values):
            operations = getattr(operations, "values", (operations,))
            if len(set(operations)) > 1:
                raise RuntimeError(
                    "All replicas must combine values of the same variables. Received, "
                    f"by replica: {', '.join(operations)}."
                )
            with context.merge_call_scope():
                return self.combine(ReduceOp.SUM, [(value, value) for value in values])

        if not tensors:
            return []
        totals: Any = replica.merge_call(merge, (replica.step.reduction, *tensors), {})
        # One copy per replica, as the caller may write in place.
        return [ops.copy(total) for total in totals]

    def combine(
        self, reduce_op: ReduceOp, pairs: Sequence[tuple[Any, Any]]
    ) -> list[Any]:
        """Call the user's `batch_reduce` and check its results."""
        results = self._ops.batch_reduce(reduce_op, pairs)
        name = type(self._ops).__name__
        if len(results) != len(pairs):
            raise ValueError(
                f"`batch_reduce` of {name} must return a value for each of the "
                f"{len(pairs)} pairs. It returned {len(results)}."
            )
        for result, (value, where) in zip(results, pairs, strict=True):
            parts = (
                result.values if isinstance(result, DistributedValues) else (result,)
            )
            if not all(ops.is_tensor(part) for part in parts):
                raise TypeError(
                    f"`reduce_implementation` of {name} must return tensors, as "
                    "`self.broadcast(total, destinations)` does. It returned "
                    f"{result!r}."
                )
            places = len(where.values) if isinstance(where, DistributedValues) else 1
            expected = [tuple(value.values[0].shape)] * places
            shapes = [tuple(part.shape) for part in parts]
            if shapes != expected:
                raise ValueError(
                    f"`reduce_implementation` of {name} must return one value for "
                    "each destination, as `self.broadcast(total, destinations)` does, "
                    f"of the shapes {expected}. It returned {shapes}."
                )
        return results

    def reduce(self, reduce_op: ReduceOp, value: DistributedValues, axis: Any) -> Any:
        values = [cast_for_sum(component) for component in value.values]
        check_same_dtype(values)
        device = context.get_strategy().extended.worker_devices[0]
        axes = axes_to_reduce(axis, [v.shape for v in values])
        if not axes:
            (result,) = self.combine(reduce_op, [(PerReplica(values), device)])
            return result
        parts = PerReplica([ops.sum(v, axis=axes) for v in values])
        (total,) = self.combine(ReduceOp.SUM, [(parts, device)])
        if reduce_op is ReduceOp.SUM:
            return total
        return total / sum(num_entries(ops.shape(v), axes) for v in values)
