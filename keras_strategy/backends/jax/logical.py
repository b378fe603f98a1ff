"""Shardings on a mesh whose replicas have several logical devices."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import keras
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from keras_strategy.backends.jax import hooks_state as keras_state
from keras_strategy.backends.jax.devices import device_named, devices_of_worker
from keras_strategy.backends.jax.distribution import (
    AXIS,
    LOGICAL_PREFIX,
    ReplicaDistribution,
    in_program,
)
from keras_strategy.core import context
from keras_strategy.rules.sharding import layout_of_weight, set_shard_spec
from keras_strategy.values.logical_devices import (
    LogicalDevices,
    partition_axes,
    prime_factors,
)
from keras_strategy.workers.cluster import Cluster


class LogicalDistribution(ReplicaDistribution):
    """`ReplicaDistribution` whose `devices` are the first of each replica.

    Args:
        logical: The devices of each replica.
        cluster: The workers, each with as many replicas; None for a single process.
        shard: What is sharded over the replicas, see `MirroredStrategy`.
    """

    # The programs of `run` are manual in the replica axis; XLA handles the others.
    has_logical_axes = True

    def __init__(
        self,
        logical: LogicalDevices,
        cluster: Cluster | None = None,
        shard: str | None = None,
    ):
        self._logical = logical
        self._all_devices = [[device_named(d) for d in ds] for ds in logical.devices]
        super().__init__(tuple(ds[0] for ds in logical.devices), cluster, shard)

    def _set_mesh(self) -> Any:
        factors = prime_factors(self._logical.per_replica)
        devices = [d for replica in self._all_devices for d in replica]
        if self.cluster is not None:
            devices = [
                device
                for rank, replicas in enumerate(self._logical.by_worker)
                for names in replicas
                for device in devices_of_worker(rank, names)
            ]
        mesh = keras.distribution.DeviceMesh(
            (self.replicas, *factors),
            [AXIS, *(f"{LOGICAL_PREFIX}{i}" for i in range(len(factors)))],
            [f"{d.platform}:{d.id}" for d in devices],
        )
        # Skip DataParallel's initializer, which supports one axis only.
        init: Any = super(keras.distribution.DataParallel, self).__init__
        init(mesh, AXIS, False)
        return mesh.backend_mesh

    def get_variable_layout(self, variable: Any) -> Any:
        axes = self._logical_axes(variable)
        if axes is None:
            return super().get_variable_layout(variable)
        # In addition, the replicas shard what `shard` names: shards of these parts.
        parts = [math.prod(self.mesh.shape[axis] for axis in dim) for dim in axes]
        split = self._splitting.spec_for(variable, parts)
        set_shard_spec(variable, split)
        # Keras's TensorLayout does not support two axes for one dimension.
        if split is None:
            return NamedSharding(self.mesh, PartitionSpec(*axes))
        return self._sharding(split, axes)

    def _logical_axes(self, variable: Any) -> list[tuple[str, ...]] | None:
        """Return the logical axes that split each dimension; None if none do."""
        weight_layout = layout_of_weight()  # which an optimizer slot shares
        if isinstance(weight_layout, NamedSharding):
            spec = [(a,) if isinstance(a, str) else a or () for a in weight_layout.spec]
            spec += [()] * (len(variable.shape) - len(spec))
            return [
                tuple(a for a in dim if a.startswith(LOGICAL_PREFIX)) for dim in spec
            ]
        layouts = self._logical.layouts
        parts = None if layouts is None else layouts.partitions_of(variable)
        return None if parts is None else self._axis_names(parts)

    def on_training(self) -> None:
        if self._logical.layouts is not None:
            self._logical.layouts.warn_unused()

    def sharding_of(self, variable: Any) -> NamedSharding:
        sharding = keras_state.sharding_of(variable)
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        return sharding if mesh in (self.mesh, self.factors) else self.everywhere

    def global_array(
        self, shape: tuple[int, ...], sharding: NamedSharding, shards: Sequence[Any]
    ) -> jax.Array:
        copies = [
            jax.device_put(shard, device)
            for shard, devices in zip(shards, self._all_devices, strict=True)
            for device in devices
        ]
        return jax.make_array_from_single_device_arrays(shape, sharding, copies)

    def constrain(self, tensor: Any, parts: Sequence[int]) -> Any:
        """Constrain how the logical devices split a traced tensor of a replica.

        Args:
            tensor: The tensor; returned unchanged unless it is traced.
            parts: The number of parts of each dimension.

        Raises:
            ValueError: If a dimension is not divisible by its number of parts.
        """
        if not parts or keras_state.is_symbolic():  # or unknown sizes have stand-ins
            return tensor
        in_replica = context.get_replica_context() is not None
        # In the global program of `fit`, the rows of all replicas come first.
        in_fit = keras.distribution.distribution() is self and not in_replica
        for i, (size, number) in enumerate(zip(tensor.shape, parts, strict=True)):
            if size % number and not (in_fit and i == 0):
                raise ValueError(
                    f"Tensor shape at `partition_dimensions[{i}]` must be divisible by "
                    "corresponding value specified by `partition_dimensions` "
                    f"({number}). Received: {size}."
                )
        if not isinstance(tensor, Tracer):
            return tensor
        first, *others = self._axis_names(parts)
        if in_program():
            mesh = jax.sharding.get_abstract_mesh()
            spec = PartitionSpec(first, *others)
            return jax.lax.with_sharding_constraint(tensor, NamedSharding(mesh, spec))
        if not in_fit:  # an eager run
            return tensor
        rows = tensor.shape[0]
        if rows % (self.replicas * parts[0]) == 0:
            first = (AXIS, *first)
        elif rows % parts[0]:
            first = ()
        spec = PartitionSpec(first, *others)
        return jax.lax.with_sharding_constraint(tensor, NamedSharding(self.mesh, spec))

    def _axis_names(self, parts: Sequence[int]) -> list[tuple[str, ...]]:
        axes = partition_axes(parts, self._logical.per_replica)
        assert axes is not None
        return [tuple(f"{LOGICAL_PREFIX}{i}" for i in dim) for dim in axes]
