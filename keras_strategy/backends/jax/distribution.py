"""Shardings of variables and batches on the mesh of a strategy's devices.

Keras's global program computes `fit` on this mesh. Its only axis is that of the
replicas. If replicas have several (logical) devices, there is one more axis for each
prime factor of their number, and XLA splits what a replica computes.
"""

import functools
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.core import Tracer
from jax.experimental.sparse import JAXSparse
from jax.sharding import NamedSharding, PartitionSpec

from keras_strategy.backends.jax import patches_state as keras_state
from keras_strategy.backends.jax.devices import device_named, devices_of_worker
from keras_strategy.cluster.membership import Cluster
from keras_strategy.core import context
from keras_strategy.data.local_rows import LocalRows
from keras_strategy.devices import (
    LogicalDevices,
    ReplicaTopology,
    partition_axes,
    prime_factors,
)
from keras_strategy.training.ownership import strategy_of_model, strategy_of_variable
from keras_strategy.training.sharding import (
    ShardSpec,
    VariableSharding,
    layout_of_weight,
    set_shard_spec,
    shard_spec_of,
)
from keras_strategy.training.variable_sync import is_sync_on_read

logger = logging.getLogger("keras_strategy")
# The mesh axis of the replicas, and the prefix of the axes of logical devices.
# Variables with fewer shards than replicas use a mesh with one axis for each prime
# factor of the number of replicas.
AXIS = "replica"
LOGICAL_PREFIX = "logical_"
# Distributions of several workers, keyed by mesh.
_by_mesh: weakref.WeakValueDictionary[Any, "ReplicaDistribution"] = (
    weakref.WeakValueDictionary()
)


def in_program() -> bool:
    """Return True if this code is traced as part of the replicas' program."""
    # Asking for the axis index and catching the error takes JAX milliseconds.
    return AXIS in jax.sharding.get_abstract_mesh().manual_axes


class ReplicaDistribution(keras.distribution.DataParallel):
    """Keras distribution that shards batches and replicates variables.

    A batch that the devices do not divide is computed as a whole on each of them: the
    result is the same, and no padding enters a mean.

    Args:
        devices: The canonical names of this worker's devices.
        cluster: The workers; None for a single process.
        shard: What is sharded over the replicas, see `MirroredStrategy`.
        home: The device that holds the variables between steps; None if every device
            does.

    Attributes:
        replicas: The number of replicas over all workers.
        mesh: The mesh of the devices of all workers.
        factors: The same devices, with an axis for each prime factor of `replicas`.
        workers: The `JaxWorkers`, set by the group; None for a single process.
        everywhere: The sharding of replicated arrays.
        split: The sharding of arrays that are split along the batch dimension.
        home: The sharding of variables on the home device, or None.
        synchronous: True if each program must end before the next one starts.
    """

    has_logical_axes = False

    def __init__(
        self,
        devices: tuple[str, ...],
        cluster: Cluster | None = None,
        shard: str | None = None,
        home: str | None = None,
    ):
        self.cluster = cluster
        self.topology = ReplicaTopology(devices, cluster)
        self.devices = [device_named(name) for name in devices]
        self.replicas = self.topology.num_replicas
        self.mesh: jax.sharding.Mesh = self._set_mesh()
        # Collectives of two concurrent programs may starve each other of CPU threads.
        self.synchronous = cluster is not None and self.devices[0].platform == "cpu"
        self.workers: Any = None
        self._warned_uneven = self._warned_gathered = False
        self.everywhere = NamedSharding(self.mesh, PartitionSpec())
        self.split = NamedSharding(self.mesh, PartitionSpec(AXIS))
        self._split_after_steps = NamedSharding(self.mesh, PartitionSpec(None, AXIS))
        self._home_mesh, self.home = None, None
        if home is not None:
            device = device_named(home)
            self._home_mesh = keras.distribution.DeviceMesh(
                (1,), [AXIS], [f"{device.platform}:{device.id}"]
            )
            self.home = NamedSharding(self._home_mesh.backend_mesh, PartitionSpec())
        self.shard = shard
        self._variable_sharding = VariableSharding(shard, self.replicas)

        _, *logical = self.mesh.axis_names
        factors = prime_factors(self.replicas) or [1]
        self.factors = jax.sharding.Mesh(
            self.mesh.devices.reshape(*factors, *self.mesh.devices.shape[1:]),
            (*(f"{AXIS}_{i}" for i in range(len(factors))), *logical),
        )
        if cluster is not None:
            _by_mesh[self.mesh] = _by_mesh[self.factors] = self

    def _set_mesh(self) -> jax.sharding.Mesh:
        """Initialize Keras's DataParallel and return the mesh."""
        devices = self.devices
        if self.cluster is not None:
            ranks, names = range(self.cluster.size), self.topology.devices
            devices = [d for rank in ranks for d in devices_of_worker(rank, names)]
        # Keras looks up devices by JAX's names.
        mesh = keras.distribution.DeviceMesh(
            (len(devices),), [AXIS], [f"{d.platform}:{d.id}" for d in devices]
        )
        super().__init__(device_mesh=mesh, auto_shard_dataset=False)
        return mesh.backend_mesh

    def get_data_layout(self, data_shape: Any) -> Any:
        if len(data_shape) == 0 or data_shape[0] % self.replicas:
            return keras.distribution.TensorLayout(
                [None] * len(data_shape), self.device_mesh
            )
        return super().get_data_layout(data_shape)

    def get_variable_layout(self, variable: Any) -> Any:
        if self._home_mesh is not None and not is_sync_on_read(variable):
            axes = [None] * len(variable.shape)
            return keras.distribution.TensorLayout(axes, self._home_mesh)
        spec = self._variable_sharding.spec_for(variable)
        set_shard_spec(variable, spec)
        if spec is not None and spec.dimension is None and spec.num_shards > 1:
            return self._sharding(spec)
        dim = None if spec is None else spec.dimension
        axes = [AXIS if i == dim else None for i in range(len(variable.shape))]
        return keras.distribution.TensorLayout(axes, self.device_mesh)

    def _spec_of(self, variable: Any) -> ShardSpec | None:
        """Return how this strategy shards a variable; None if it does not."""
        spec, strategy = shard_spec_of(variable), strategy_of_variable(variable)
        if spec is None or strategy is None:
            return None
        group = strategy.extended.group
        return spec if getattr(group, "distribution", None) is self else None

    def sharded_dim(self, variable: Any) -> int | None:
        """Return the dimension along which all replicas shard a variable.

        None if it is not sharded or has fewer shards than replicas: JAX gathers the
        latter before a program of `run` starts.
        """
        spec = self._spec_of(variable)
        return None if spec is None else spec.dimension

    def sharding_of(self, variable: Any) -> NamedSharding:
        """Return the sharding of a variable in programs."""
        spec = self._spec_of(variable)
        return self.everywhere if spec is None else self._sharding(spec)

    def stored_sharding(self, variable: Any) -> NamedSharding:
        """Return the sharding of a variable between programs."""
        return self.home or self.sharding_of(variable)

    def from_home(self, arrays: Any) -> Any:
        """Copy a structure of arrays to all devices, so that a step may donate them."""
        return _map_arrays(
            lambda x: jax.device_put(x, self.everywhere, may_alias=False), arrays
        )

    def to_home(self, arrays: Any) -> Any:
        """Move a structure of arrays to the home device, if there is one."""
        if self.home is None:
            return arrays
        return _map_arrays(lambda x: jax.device_put(x, self.home), arrays)

    def _sharding(
        self, shard_spec: ShardSpec, logical: Sequence[tuple[str, ...]] = ()
    ) -> NamedSharding:
        """Return the sharding of a sharded variable.

        Args:
            shard_spec: How the replicas shard it.
            logical: The axes of logical devices that also split each dimension.
        """
        if shard_spec.dimension is not None:
            mesh, replica_axes = self.mesh, [(AXIS, shard_spec.dimension)]
        else:
            # The same devices in the same order, so one program can use both meshes.
            mesh = self.mesh if shard_spec.num_shards == 1 else self.factors
            names = (f"{AXIS}_{i}" for i in range(len(shard_spec.by_factors)))
            replica_axes = list(zip(names, shard_spec.by_factors, strict=True))
        axes = dict(enumerate(logical))
        for name, dim in reversed(replica_axes):
            if dim is not None:
                axes[dim] = (name, *axes.get(dim, ()))
        spec = [axes.get(i, ()) for i in range(1 + max(axes, default=-1))]
        # JAX's canonical form for zero or one axis.
        spec = [dim if len(dim) > 1 else dim[0] if dim else None for dim in spec]
        return NamedSharding(mesh, PartitionSpec(*spec))

    def place_batch(self, batch: Any, steps_in_front: bool = False) -> Any:
        """Put a batch on the devices, split along the batch dimension if possible.

        Sparse matrices are replicated, because their entries are in no order of rows.

        Args:
            batch: A structure of arrays and None, or the `LocalRows` of this worker.
            steps_in_front: The first axis holds the steps that Keras executes at once,
                the second one the rows.
        """
        if isinstance(batch, LocalRows):
            return keras.tree.map_structure(
                functools.partial(self._global_rows, rows=batch), batch.batch
            )
        leaves = keras.tree.flatten(batch)
        split = self._split_after_steps if steps_in_front else self.split
        axis, replicas = int(steps_in_front), self.replicas
        for i, leaf in enumerate(leaves):
            if leaf is None:
                continue
            if isinstance(leaf, JAXSparse):
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
        self,
        shape: tuple[int, ...],
        sharding: NamedSharding,
        shards: Sequence[jax.Array],
    ) -> jax.Array:
        """Return the global array of shards on `devices`.

        Args:
            shape: The global shape.
            sharding: `everywhere` or `split`.
            shards: One array for each of `devices`.
        """
        return jax.make_array_from_single_device_arrays(shape, sharding, list(shards))

    def warn_uneven(
        self, batches: Iterable[Any], steps_in_front: bool = False
    ) -> Iterator[Any]:
        """Yield the batches, and warn if the replicas do not divide their rows.

        An uneven last batch is normal and raises no warning. For `steps_in_front`, see
        `place_batch`.
        """
        previous = 0
        axis = int(steps_in_front)
        for batch in batches:
            if previous % self.replicas and not self._warned_uneven:
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

    def warn_gathered_rows(self, counts: Sequence[int]) -> None:
        """Warn once that the rows of a step are gathered on all workers."""
        if self._warned_gathered:
            return
        self._warned_gathered = True
        assert self.cluster is not None
        logger.warning(
            "The rows of a step that the workers have read are sent to all workers "
            "(%s): a JAX program needs equally many rows on each device. The result is "
            "correct. To avoid the transfer, give each worker batches of the same "
            "number of rows, a multiple of %d.",
            self.cluster.format_by_worker(counts),
            len(self.devices),
        )

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


def _map_arrays(fn: Callable[[jax.Array], jax.Array], structure: Any) -> Any:
    return keras.tree.map_structure(
        lambda x: (
            fn(x) if isinstance(x, jax.Array) and not isinstance(x, Tracer) else x
        ),
        structure,
    )


def distribution_of_sharding(sharding: Any) -> ReplicaDistribution:
    """Return a multi-worker distribution with the sharding's mesh."""
    return _by_mesh[sharding.mesh]


def put(value: Any, sharding: Any) -> Any:
    """Put a value that every worker holds on devices, like `jax.device_put`.

    JAX would first compare the value between the workers, by one collective per value,
    and it rejects arrays that already are on the devices of all workers.
    """
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
        jax.device_put(_shard(value, index), device, may_alias=False)
        for device, index in sharding.addressable_devices_indices_map(
            value.shape
        ).items()
    ]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, shards)


def _shard(value: Any, index: tuple[slice, ...]) -> Any:
    return value if all(s == slice(None) for s in index) else value[index]


@functools.cache
def _reshard_fn(sharding: Any) -> Any:
    return jax.jit(lambda x: x, out_shardings=sharding)


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
        spec = self._variable_sharding.spec_for(variable, parts)
        set_shard_spec(variable, spec)
        # Keras's TensorLayout does not support two axes for one dimension.
        if spec is None:
            return NamedSharding(self.mesh, PartitionSpec(*axes))
        return self._sharding(spec, axes)

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


def current_distribution() -> Any:
    """Return the active Keras distribution if it belongs to a strategy."""
    distribution = keras.distribution.distribution()
    return distribution if isinstance(distribution, ReplicaDistribution) else None


def strategy_distribution(strategy: Any) -> Any:
    """Return the distribution of a strategy with several devices, or None."""
    if strategy is None:
        return None
    return getattr(strategy.extended.group, "distribution", None)


def multi_worker_distribution(model: Any) -> Any:
    """Return the distribution of a model's strategy if it has several workers."""
    distribution = strategy_distribution(strategy_of_model(model))
    if distribution is None or distribution.cluster is None:
        return None
    return distribution


def home_distribution(model: Any) -> Any:
    """Return the distribution of a model's strategy if it has a home device."""
    distribution = strategy_distribution(strategy_of_model(model))
    return None if distribution is None or distribution.home is None else distribution
