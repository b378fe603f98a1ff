"""Shardings of variables and batches on the mesh of a strategy's devices.

Keras's global program computes `fit` on this mesh. Its only axis is that of the
replicas. If replicas have several (logical) devices, there is one more axis for each
prime factor of their number, and XLA splits what a replica computes.
"""

import contextvars
import functools
import logging
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer
from jax.experimental.sparse import JAXSparse
from jax.sharding import NamedSharding, PartitionSpec

from keras_strategy.backends.jax import internals
from keras_strategy.backends.jax.connection import device_named
from keras_strategy.cluster.membership import Cluster
from keras_strategy.core import context
from keras_strategy.core.protocols import Strategy
from keras_strategy.core.step_state import LocalRows
from keras_strategy.devices import (
    LogicalDevices,
    ReplicaTopology,
    partition_axes,
    prime_factors,
)
from keras_strategy.keras_patches.internals import in_symbolic_scope
from keras_strategy.training.sharding import VariableSharding, layout_of_weight
from keras_strategy.training.variable_sync import is_sync_on_read

logger = logging.getLogger("keras_strategy")
# The mesh axis of the replicas, and the prefix of the axes of logical devices.
# Variables with fewer shards than replicas use a mesh with one axis for each prime
# factor of the number of replicas.
AXIS = "replica"
LOGICAL_PREFIX = "logical_"
# Distributions of several workers, keyed by mesh.
by_mesh: weakref.WeakValueDictionary[Any, "ReplicaDistribution"] = (
    weakref.WeakValueDictionary()
)


# True while a program of virtual replicas is traced.
tracing_virtual = contextvars.ContextVar("tracing_virtual", default=False)


def in_program() -> bool:
    """Return True if this code is traced as part of the replicas' program."""
    # Asking for the axis index and catching the error takes JAX milliseconds.
    return AXIS in jax.sharding.get_abstract_mesh().manual_axes or tracing_virtual.get()


class ReplicaDistribution(keras.distribution.DataParallel):
    """Keras distribution that shards batches and replicates variables."""

    # A batch that the devices do not divide is computed as a whole on each of them: the
    # result is the same, and no padding enters a mean. `home` is the device that holds
    # the variables between steps, unless every device does.

    of_strategy = True

    def __init__(
        self,
        logical: LogicalDevices,
        cluster: Cluster | None = None,
        shard: str | None = None,
        home: str | None = None,
        per_device: int | None = None,
    ):
        self.cluster = cluster
        # The number of virtual replicas of each device; None without them.
        self.per_device, count = per_device, per_device or 1
        self.shard = shard
        self.workers: Any = None  # the `JaxWorkers`, set by the group
        self._logical = logical
        self._all_devices = [
            [device_named(d) for d in ds]
            for ds in logical.devices
            for _ in range(count)
        ]
        # The first device of each of this worker's replicas.
        self.devices = [devices[0] for devices in self._all_devices]
        # The programs of `run` are manual in the replica axis; XLA handles the others.
        self.has_logical_axes = logical.per_replica > 1
        first = tuple(ds[0] for ds in logical.devices for _ in range(count))
        self.topology = ReplicaTopology(first, cluster, per_device is not None)
        self.replicas = self.topology.num_replicas
        self._variable_sharding = VariableSharding(shard, self.replicas)
        # If true, a program must end before the next one starts: on CPUs, collectives
        # of two programs may starve each other of threads.
        self.synchronous = cluster is not None and self.devices[0].platform == "cpu"
        self._warned_uneven = self.warned_gathered = False
        # The shapes of the last batch whose arrays differ in rows.
        self.differing_shapes: list[tuple[int, ...]] | None = None

        devices = [
            device_named(name, None if cluster is None else rank)
            for rank, replicas in enumerate(logical.by_worker)
            for names in replicas
            for name in names
        ]
        sizes = prime_factors(logical.per_replica)
        axes = [f"{LOGICAL_PREFIX}{i}" for i in range(len(sizes))]
        mesh = keras.distribution.DeviceMesh(
            (self.replicas // count, *sizes),
            [AXIS, *axes],
            [f"{d.platform}:{d.id}" for d in devices],  # as Keras looks them up
        )
        # Skip DataParallel's initializer, which supports one axis only.
        init: Any = super(keras.distribution.DataParallel, self).__init__
        init(mesh, AXIS, False)
        self.mesh: jax.sharding.Mesh = mesh.backend_mesh
        # The same devices, with an axis for each prime factor of `replicas`.
        factors = prime_factors(self.replicas // count) or [1]
        self.factors = jax.sharding.Mesh(
            self.mesh.devices.reshape(*factors, *sizes),
            (*(f"{AXIS}_{i}" for i in range(len(factors))), *axes),
        )
        if cluster is not None:
            by_mesh[self.mesh] = by_mesh[self.factors] = self

        # The shardings of arrays that are replicated, or split by rows.
        self.everywhere = NamedSharding(self.mesh, PartitionSpec())
        self.split = NamedSharding(self.mesh, PartitionSpec(AXIS))
        self._split_after_steps = NamedSharding(self.mesh, PartitionSpec(None, AXIS))
        self.home = None  # or the sharding of variables on the home device
        if home is not None:
            home_mesh = jax.sharding.Mesh([device_named(home)], [AXIS])
            self.home = NamedSharding(home_mesh, PartitionSpec())

    def distribute_dataset(self, dataset: Any) -> Any:
        return dataset  # `data` has split it

    def get_data_layout(self, data_shape: Any) -> Any:
        if len(data_shape) == 0 or data_shape[0] % self.replicas:
            return keras.distribution.TensorLayout(
                [None] * len(data_shape), self.device_mesh
            )
        return super().get_data_layout(data_shape)

    def get_variable_layout(self, variable: Any) -> NamedSharding:
        if self.home is not None and not is_sync_on_read(variable):
            return self.home
        axes = self._logical_axes(variable)
        # In addition, the replicas shard what `shard` names: shards of these parts.
        parts = [math.prod(self.mesh.shape[axis] for axis in dim) for dim in axes]
        spec = self._variable_sharding.set_spec(variable, parts)
        mesh, replica_axes = self.mesh, []
        if spec is not None and spec.dimension is not None:
            replica_axes = [(AXIS, spec.dimension)]
        elif spec is not None:
            # The same devices in the same order, so one program can use both meshes.
            mesh = self.factors
            replica_axes = [(f"{AXIS}_{i}", d) for i, d in enumerate(spec.by_factors)]
        by_dim = dict(enumerate(axes))
        for name, dim in reversed(replica_axes):
            if dim is not None:
                by_dim[dim] = (name, *by_dim.get(dim, ()))
        names = [by_dim.get(i, ()) for i in range(1 + max(by_dim, default=-1))]
        # JAX's canonical form for zero or one axis.
        names = [dim if len(dim) > 1 else dim[0] if dim else None for dim in names]
        return NamedSharding(mesh, PartitionSpec(*names))

    def _logical_axes(self, variable: Any) -> Sequence[tuple[str, ...]]:
        """Return the logical axes that split each dimension; empty if none do."""
        layouts, weight_layout = self._logical.layouts, layout_of_weight()
        if layouts is None:
            return ()
        if isinstance(weight_layout, NamedSharding):  # which an optimizer slot shares
            axes = [_axes_of(dim, LOGICAL_PREFIX) for dim in weight_layout.spec]
            if not any(axes):
                return ()
            return axes + [()] * (len(variable.shape) - len(axes))
        parts = layouts.partitions_of(variable)
        return () if parts is None else self._axis_names(parts)

    def sharded_dim(self, variable: Any) -> int | None:
        """Return the dimension along which all replicas shard a variable, or None."""
        # A variable with fewer shards is gathered before a program of `run` starts.
        spec = self.sharding_of(variable).spec
        return next((i for i, dim in enumerate(spec) if AXIS in _axes_of(dim)), None)

    def sharding_of(self, variable: Any) -> NamedSharding:
        """Return the sharding of a variable in programs."""
        layout = internals.sharding_of(variable)
        mesh = layout.mesh if isinstance(layout, NamedSharding) else None
        return layout if mesh in (self.mesh, self.factors) else self.everywhere

    def from_home(self, arrays: Any) -> Any:
        """Copy a structure of arrays to all devices, so that a step may donate them."""
        return jax.device_put(arrays, self.everywhere, may_alias=False)

    def to_home(self, arrays: Any) -> Any:
        if self.home is None or isinstance(arrays, Tracer):
            return arrays
        return jax.device_put(arrays, self.home)

    def place_batch(self, batch: Any, steps_in_front: bool = False) -> Any:
        """Put a batch on the devices, split along the batch dimension if possible."""
        # `batch` may be the `LocalRows` of this worker. With `steps_in_front`, its
        # first axis holds the steps that Keras executes at once, the second the rows.
        if isinstance(batch, LocalRows):
            return keras.tree.map_structure(
                functools.partial(self._global_rows, rows=batch), batch.batch
            )
        leaves = keras.tree.flatten(batch)
        split = self._split_after_steps if steps_in_front else self.split
        axis, replicas = int(steps_in_front), self.replicas
        shapes = [leaf.shape for leaf in leaves if hasattr(leaf, "shape")]
        if len({shape[axis : axis + 1] for shape in shapes}) > 1:
            self.differing_shapes = shapes
        for i, leaf in enumerate(leaves):
            if leaf is None:
                continue
            if isinstance(leaf, JAXSparse):  # its entries are in no order of rows
                leaves[i] = jax.tree.map(lambda x: put(x, self.everywhere), leaf)
                continue
            if not hasattr(leaf, "shape"):
                leaf = keras.ops.convert_to_tensor(leaf)
            shape = leaf.shape
            even = len(shape) > axis and shape[axis] % replicas == 0
            sharding = split if even else self.everywhere
            if type(leaf) is np.ndarray:
                # Twice as fast as `jax.device_put`.
                leaves[i] = jax.make_array_from_callback(
                    shape, sharding, leaf.__getitem__
                )
            else:
                leaves[i] = put(leaf, sharding)
        return keras.tree.pack_sequence_as(batch, leaves)

    def _global_rows(self, leaf: Any, rows: LocalRows) -> Any:
        """Return a global array of each worker's local rows, without communication."""
        if leaf is None:
            return None
        if rows.global_rows % self.replicas:
            return put(leaf, self.everywhere)

        first = rows.bounds[0][0]

        def device_rows(index):
            device_slice, *others = index
            begin, end = device_slice.start - first, device_slice.stop - first
            return leaf[(slice(begin, end), *others)]

        shape = (rows.global_rows, *leaf.shape[1:])
        return jax.make_array_from_callback(shape, self.split, device_rows)

    def join_shards(self, shards: Sequence[jax.Array]) -> jax.Array:
        """Return the global array, split by rows, of local shards."""
        rows, *others = shards[0].shape
        return self.global_array((self.replicas * rows, *others), self.split, shards)

    def global_array(
        self, shape: tuple[int, ...], sharding: NamedSharding, shards: Sequence[Any]
    ) -> jax.Array:
        """Return the global array of shards on `devices`: `everywhere` or `split`."""
        if self.per_device is not None:
            count = self.per_device
            if sharding != self.split:
                shards = shards[::count]
            else:
                shards = [
                    jnp.concatenate(shards[i : i + count])
                    for i in range(0, len(shards), count)
                ]
        if self.has_logical_axes:  # which do not divide those shardings
            shards = [
                jax.device_put(shard, device)
                for shard, devices in zip(shards, self._all_devices, strict=True)
                for device in devices
            ]
        return jax.make_array_from_single_device_arrays(shape, sharding, list(shards))

    def local_shards(self, array: jax.Array) -> tuple[jax.Array, ...]:
        """Return an array's shards on this worker's devices, in replica order."""
        by_device = {shard.device: shard.data for shard in array.addressable_shards}
        count = self.per_device
        if count is None or array.sharding != self.split:
            return tuple(by_device[device] for device in self.devices)
        return tuple(
            part
            for device in self.devices[::count]
            for part in jnp.split(by_device[device], count)
        )

    def warn_uneven(
        self, batches: Iterable[Any], steps_in_front: bool = False
    ) -> Iterator[Any]:
        """Yield the batches; warn if replicas do not divide those before the last."""
        previous, axis = 0, int(steps_in_front)  # an uneven last batch is normal
        for batch in batches:
            is_slow = previous % self.replicas and self.per_device is None
            if is_slow and not self._warned_uneven:
                self._warned_uneven = True
                logger.warning(
                    "Batches of %d rows cannot be split evenly over %d devices, so "
                    "every device computes all rows: the result is correct, but no "
                    "faster than on one device. Choose a batch size that is a multiple "
                    "of %d.",
                    previous,
                    self.replicas,
                    self.replicas,
                )
            yield batch
            if isinstance(batch, LocalRows):
                previous = batch.global_rows
                continue
            first = batch
            while isinstance(first, tuple | list) and first:
                first = first[0]
            if not hasattr(first, "shape"):  # None, or a different kind of structure
                arrays = (x for x in keras.tree.flatten(batch) if hasattr(x, "shape"))
                first = next(arrays, None)
            shape = getattr(first, "shape", ())
            previous = shape[axis] if len(shape) > axis else 0

    def on_training(self) -> None:
        """Run checks that need all trained weights to exist."""
        if self._logical.layouts is not None:
            self._logical.layouts.warn_unused()

    def move_committed(self, value: Any) -> Any:
        """Move an array to the variables' devices if it is committed to others."""
        sharding = self.home or self.everywhere
        if (
            isinstance(value, jax.Array)
            and not isinstance(value, Tracer)
            and value.committed
            and value.sharding.device_set != sharding.device_set
        ):
            return put(value, sharding)
        return value

    def constrain(self, tensor: Any, parts: Sequence[int]) -> Any:
        """Constrain how logical devices split a tensor, in `parts` per dimension."""
        if not parts or in_symbolic_scope():  # or unknown sizes have stand-ins
            return tensor
        in_replica = context.current_replica() is not None
        # In the global program of `fit`, the rows of all replicas come first.
        in_fit = keras.distribution.distribution() is self and not in_replica
        for i, (size, number) in enumerate(zip(tensor.shape, parts, strict=True)):
            if size % number and not (in_fit and i == 0):
                raise ValueError(
                    f"Tensor shape at `partition_dimensions[{i}]` must be divisible by "
                    "corresponding value specified by `partition_dimensions` "
                    f"({number}). Received: {size}."
                )
        if not isinstance(tensor, Tracer):  # it is only checked
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


def _axes_of(dim: Any, prefix: str = "") -> tuple[str, ...]:
    """Return the axes, with a prefix, in an entry of a PartitionSpec."""
    axes = dim if isinstance(dim, tuple) else (dim,)
    return tuple(axis for axis in axes if axis and axis.startswith(prefix))


def put(value: Any, sharding: Any) -> Any:
    """Put a value that every worker holds on devices, like `jax.device_put`."""
    # JAX would first compare the value between the workers, by one collective per
    # value, and it rejects arrays that already are on the devices of all workers.
    if isinstance(value, Tracer) or sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    if isinstance(value, jax.Array):
        if value.sharding.is_equivalent_to(sharding, value.ndim):
            return value
        if not value.is_fully_addressable:
            return _reshard_fn(sharding)(value)
    else:
        value = np.asarray(value)
        value = value.astype(jax.dtypes.canonicalize_dtype(value.dtype), copy=False)
    shards = [
        # A program may donate the result, so it must not alias the caller's memory.
        jax.device_put(
            value if all(s == slice(None) for s in index) else value[index],
            device,
            may_alias=False,
        )
        for device, index in sharding.addressable_devices_indices_map(
            value.shape
        ).items()
    ]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, shards)


@functools.cache
def _reshard_fn(sharding: Any) -> Any:
    return jax.jit(lambda x: x, out_shardings=sharding)


def current_distribution() -> Any:
    """Return the active Keras distribution if it belongs to a strategy."""
    distribution = keras.distribution.distribution()
    return distribution if isinstance(distribution, ReplicaDistribution) else None


def strategy_distribution(strategy: Strategy) -> Any:
    """Return the distribution of a strategy with several devices, or None."""
    group = None if strategy is None else strategy.extended.group
    return getattr(group, "distribution", None)
