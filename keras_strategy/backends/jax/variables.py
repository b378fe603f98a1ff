"""The class of variables whose arrays a compiled program may donate."""

import inspect
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from keras_strategy.backends.jax.distribution import ReplicaDistribution, put
from keras_strategy.keras_patches.internals import current_stateless_scope, stored_value
from keras_strategy.keras_patches.patch import in_scope_of_workers
from keras_strategy.keras_patches.variable_classes import (
    StrategyVariable,
    keras_value,
    set_kind,
)
from keras_strategy.training import ownership
from keras_strategy.training.saving import overridden_value

_NOTE = "_ks_array_note"
_get_note: Callable[[Any], Any] = attrgetter(_NOTE)

# A reference that equals no array.
no_array: Callable[[], Any] = object

OVERRIDDEN = {
    "value": None,
    "_initialize": "(self, value)",
    "_initialize_with_initializer": "(self, initializer)",
    "__array__": "(self, dtype=None)",
}


class ArrayNote:
    """Weak references to the array that a variable holds; they match no later one."""

    __slots__ = ("donatable", "placed")

    def __init__(self):
        # The array, if a program may donate it.
        self.donatable: Callable[[], Any] = no_array
        # The array, if it has the sharding that programs need.
        self.placed: Callable[[], Any] = no_array


class MirroredVariable(StrategyVariable):
    """A variable of all replicas."""

    @property
    def value(self) -> Any:
        # Broadcast pending initial values before the first read.
        if ownership.pending_values and current_stateless_scope() is None:
            ownership.broadcast_pending_values()
        forbid_donation(self)
        return keras_value(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        discard_note(self)  # a copy may share the array
        return super().__reduce_ex__(protocol)

    def _initialize(self, value: Any) -> None:
        """Use the chief's initial value on every worker."""
        super()._initialize(value)
        strategy = in_scope_of_workers()
        if strategy is not None and not isinstance(self._value, Tracer):
            ownership.pending_values.append((strategy, self))

    def _initialize_with_initializer(self, initializer: Any) -> None:
        # Keras makes each process draw its shards with its own seed. An initializer
        # with an argument `layout` is called as Keras does.
        if (
            in_scope_of_workers() is None
            or "layout" in inspect.signature(initializer).parameters
        ):
            super()._initialize_with_initializer(initializer)
            return
        value = initializer(self._shape, dtype=self._dtype)
        self._initialize(self._convert_to_tensor(value))

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        """Gather the value if several workers shard it."""
        array = stored_value(self)
        if (
            not isinstance(array, jax.Array)
            or isinstance(array, Tracer)
            or array.is_fully_addressable
            or array.is_fully_replicated
        ):
            return super().__array__(dtype)
        # A collective, unless each worker holds all shards.
        override = overridden_value(self)
        if override is not None:
            return np.array(override, dtype)
        distribution = ownership.strategy_of_variable(self).extended.group.distribution
        local, *_ = distribution.local_shards(gather_variable(self, distribution))
        return np.array(local, dtype)  # always a copy


def array_notes(variables: Sequence[Any]) -> list[ArrayNote]:
    try:
        return list(map(_get_note, variables))
    except AttributeError:  # a variable without a note
        return [vars(v).get(_NOTE) or _add_note(v) for v in variables]


def _add_note(variable: Any) -> ArrayNote:
    set_kind(variable, MirroredVariable)
    note = vars(variable)[_NOTE] = ArrayNote()
    return note


def forbid_donation(variable: Any) -> None:
    """Record that other code may hold the variable's array or a part of it."""
    note = vars(variable).get(_NOTE)
    if note is not None:
        note.donatable = no_array


def discard_note(variable: Any) -> None:
    vars(variable).pop(_NOTE, None)


def assemble_locally(array: jax.Array) -> np.ndarray | None:
    """Assemble an array of which every process holds all shards; None otherwise."""
    by_process: dict[int, set[str]] = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        by_process.setdefault(device.process_index, set()).add(str(index))
    if len(set(map(frozenset, by_process.values()))) > 1:
        return None
    result = np.empty(array.shape, array.dtype)
    for shard in {str(s.index): s for s in array.addressable_shards}.values():
        result[shard.index] = shard.data
    return result


def gather_variable(variable: Any, distribution: ReplicaDistribution) -> jax.Array:
    """Gather a variable on every device, outside of programs."""
    array = stored_value(variable)
    if distribution.cluster is None:
        return put(array, distribution.everywhere)
    local = assemble_locally(array)
    if local is not None:  # no collective is necessary
        return put(local, distribution.everywhere)
    with distribution.cluster.client.track_operation(f"gathering '{variable.path}'"):
        return jax.block_until_ready(put(array, distribution.everywhere))
