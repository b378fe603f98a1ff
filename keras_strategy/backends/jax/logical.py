"""The layouts of a group whose replicas have several devices each: logical devices.

One mesh: the replicas, and an axis for each prime factor of the number of logical
devices. What a replica computes stays one program, of which XLA gives each logical
device its share, by how variables and tensors are laid out.
"""

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
    LOGICAL,
    ReplicaDistribution,
)
from keras_strategy.backends.jax.replica import in_program
from keras_strategy.core import context
from keras_strategy.rules.sharding import layout_of_weight, note_split
from keras_strategy.values.logical_devices import (
    LogicalDevices,
    axes_of_parts,
    prime_factors,
)
from keras_strategy.workers.cluster import Cluster


class LogicalDistribution(ReplicaDistribution):
    """See `ReplicaDistribution`, whose `devices` are each replica's first here.

    Args:
        logical: The devices of each replica.
        cluster: The workers, each with as many replicas; None for this one alone.
        shard: What is split over the replicas, see `MirroredStrategy`.
    """

    def __init__(
        self,
        logical: LogicalDevices,
        cluster: Cluster | None = None,
        shard: str | None = None,
    ):
        self._logical = logical
        self._all_devices = [[device_named(d) for d in ds] for ds in logical.devices]
        super().__init__(tuple(ds[0] for ds in logical.devices), cluster, shard)
        # Programs of `run` are written for the replicas' axis alone; XLA has the rest.
        self.of_replicas_alone = True

    def _set_mesh(self) -> Any:
        factors = prime_factors(self._logical.per_replica)
        devices = [d for own in self._all_devices for d in own]
        if self.cluster is not None:
            devices = [
                device
                for rank, replicas in enumerate(self._logical.of_workers)
                for names in replicas
                for device in devices_of_worker(rank, names)
            ]
        mesh = keras.distribution.DeviceMesh(
            (self.replicas, *factors),
            [AXIS, *(f"{LOGICAL}{i}" for i in range(len(factors)))],
            [f"{d.platform}:{d.id}" for d in devices],
        )
        # Not DataParallel's, which is for one axis.
        tell_keras: Any = super(keras.distribution.DataParallel, self).__init__
        tell_keras(mesh, AXIS, False)
        return mesh.backend_mesh

    def get_variable_layout(self, variable: Any) -> Any:
        axes = self._axes_of(variable)
        if axes is None:
            return super().get_variable_layout(variable)
        # Besides, the replicas share what `shard` says: parts of these parts.
        parts = [math.prod(self.mesh.shape[axis] for axis in own) for own in axes]
        split = self._splitting.of(variable, parts)
        note_split(variable, split)
        # Keras's own layouts have no dimension that two axes split.
        if split is None:
            return NamedSharding(self.mesh, PartitionSpec(*axes))
        return self._in_parts(split, axes)

    def _axes_of(self, variable: Any) -> list[tuple[str, ...]] | None:
        """What axes of logical devices split a variable's dimensions; None for none."""
        of_weight = layout_of_weight()  # which what is kept of it lies as
        if isinstance(of_weight, NamedSharding):
            named = [(a,) if isinstance(a, str) else a or () for a in of_weight.spec]
            named += [()] * (len(variable.shape) - len(named))
            return [tuple(a for a in own if a.startswith(LOGICAL)) for own in named]
        layouts = self._logical.layouts
        parts = None if layouts is None else layouts.parts_of(variable)
        return None if parts is None else self._names(parts)

    def training(self) -> None:
        if self._logical.layouts is not None:
            self._logical.layouts.warn_of_unused()

    def sharding_of(self, variable: Any) -> NamedSharding:
        sharding = keras_state.sharding_of(variable)
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        return sharding if mesh in (self.mesh, self.factors) else self.everywhere

    def global_array(
        self, shape: tuple[int, ...], sharding: NamedSharding, parts: Sequence[Any]
    ) -> jax.Array:
        copies = [
            jax.device_put(part, device)
            for part, devices in zip(parts, self._all_devices, strict=True)
            for device in devices
        ]
        return jax.make_array_from_single_device_arrays(shape, sharding, copies)

    def laid_out(self, tensor: Any, parts: Sequence[int]) -> Any:
        """A tensor of a replica that its logical devices share, in a program.

        Args:
            tensor: The tensor; one that is not traced is left where it is.
            parts: Into how many parts each of its dimensions is split.

        Raises:
            ValueError: If a dimension cannot be split into as many.
        """
        if not parts or keras_state.is_symbolic():  # or sizes stand for unknown ones
            return tensor
        of_replica = context.get_replica_context() is not None
        # The global program of `fit`, in which the rows of all replicas come first.
        in_fit = keras.distribution.distribution() is self and not of_replica
        for i, (size, number) in enumerate(zip(tensor.shape, parts, strict=True)):
            if size % number and not (in_fit and i == 0):
                raise ValueError(
                    f"Tensor shape at `partition_dimensions[{i}]` must be divisible by "
                    "corresponding value specified by `partition_dimensions` "
                    f"({number}). Received: {size}."
                )
        if not isinstance(tensor, Tracer):
            return tensor
        first, *others = self._names(parts)
        if in_program():
            mesh = jax.sharding.get_abstract_mesh()
            spec = PartitionSpec(first, *others)
            return jax.lax.with_sharding_constraint(tensor, NamedSharding(mesh, spec))
        if not in_fit:  # replicas in turns
            return tensor
        rows = tensor.shape[0]
        if rows % (self.replicas * parts[0]) == 0:
            first = (AXIS, *first)
        elif rows % parts[0]:
            first = ()
        spec = PartitionSpec(first, *others)
        return jax.lax.with_sharding_constraint(tensor, NamedSharding(self.mesh, spec))

    def _names(self, parts: Sequence[int]) -> list[tuple[str, ...]]:
        """The names of the axes that split each dimension."""
        axes = axes_of_parts(parts, self._logical.per_replica)
        assert axes is not None
        return [tuple(f"{LOGICAL}{i}" for i in own) for own in axes]
