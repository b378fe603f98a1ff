"""Reductions on one device, and the devices of destinations."""

from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_strategy.core import context
from keras_strategy.core.registry import get_engine
from keras_strategy.rules.reduction import cast_for_sum, check_same_dtype
from keras_strategy.values.devices import canonical_device
from keras_strategy.values.distributed import DistributedValues, ReduceOp


def reduce_on_device(
    reduce_op: ReduceOp,
    values: Sequence[Any],
    place: str | None,
    add: Callable[[list[Any]], Any],
) -> Any:
    """Copy tensors to a device (None: the program decides) and sum or average them."""
    values = [cast_for_sum(value) for value in values]
    check_same_dtype(values)
    if place is not None:
        values = [get_engine().copy_to(value, place) for value in values]
    total = add(values)
    return total / len(values) if reduce_op is ReduceOp.MEAN else total


def add_tensors(values: list[Any]) -> Any:
    """Add tensors of one device in order."""
    return sum(values[1:], values[0])


def destination_devices(destinations: Any) -> list[str | None]:
    """Return the destinations' devices, None where the program decides."""
    if isinstance(destinations, str):
        return [canonical_device(destinations)]
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
