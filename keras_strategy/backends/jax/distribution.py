"""The layouts by which Keras's own global program works for a group."""

import functools
import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.core import Tracer
from jax.experimental.sparse import JAXSparse

from keras_strategy.backends.jax.devices import device_named, devices_of_worker
from keras_strategy.input.own_rows import OwnRows
from keras_strategy.rules.aggregation import is_on_read
from keras_strategy.rules.ownership import strategy_of_variable
from keras_strategy.rules.sharding import Split, Splitting, note_split, split_of
from keras_strategy.values.logical_devices import prime_factors
from keras_strategy.values.topology import Topology
from keras_strategy.workers.cluster import Cluster

logger = logging.getLogger("keras_strategy")
# The name of the mesh's only axis; where replicas have several devices, of its first,
# and how the names of the others begin. In layouts of what fewer parts than replicas
# are made of, there is an axis for each prime factor of their number instead.
AXIS = "replica"
LOGICAL = "logical_"
# By the mesh, of what has several workers.
_of_mesh: weakref.WeakValueDictionary[Any, "ReplicaDistribution"] = (
    weakref.WeakValueDictionary()
)


class ReplicaDistribution(keras.distribution.DataParallel):
    """Batches split by rows where they can be, variables on every device.

    A batch that the devices do not divide is computed whole on each of them: the
    result is the same, and no padding gets into a mean.

    Args:
        devices: Canonical names of this worker's devices.
        cluster: The workers, each with as many devices; None for this one alone.
        shard: What is split over the devices, see `MirroredStrategy`.
        home: The device that keeps the variables; None where each device does.

    Attributes:
        topology: Where the replicas are.
        devices: This worker's devices.
        replicas: The number of devices, over all workers.
        mesh: The devices of all workers.
        factors: They, with an axis for each prime factor of the number of replicas.
        shard: The argument.
        workers: What tells other workers, set by the group; None for this one alone.
        everywhere: The layout of what every device has whole.
        home: That of variables which one device keeps between steps, or None.
        split: That of what is split by rows.
        of_replicas_alone: Whether the mesh has axes beside that of the replicas.
    """

    of_replicas_alone = False

    def __init__(
        self,
        devices: tuple[str, ...],
        cluster: Cluster | None = None,
        shard: str | None = None,
        home: str | None = None,
    ):
        self.cluster = cluster
        self.topology = Topology(devices, cluster)
        self.devices = [device_named(name) for name in devices]
        self.replicas = self.topology.num_replicas
        self.mesh: jax.sharding.Mesh = self._set_mesh()
        # Collectives of two programs at once may starve each other of CPU threads.
        self.one_at_a_time = cluster is not None and self.devices[0].platform == "cpu"
        self.workers: Any = None
        self._warned = self._warned_of_gathering = False
        self.everywhere = jax.sharding.NamedSharding(
            self.mesh, jax.sharding.PartitionSpec()
        )
        self.split = jax.sharding.NamedSharding(
            self.mesh, jax.sharding.PartitionSpec(AXIS)
        )
        self._home_mesh, self.home = None, None
        if home is not None:
            device = device_named(home)
            self._home_mesh = keras.distribution.DeviceMesh(
                (1,), [AXIS], [f"{device.platform}:{device.id}"]
            )
            self.home = jax.sharding.NamedSharding(
                self._home_mesh.backend_mesh, jax.sharding.PartitionSpec()
            )
        self.shard = shard
        self._splitting = Splitting(shard, self.replicas)
        self._split_after_steps = jax.sharding.NamedSharding(
            self.mesh, jax.sharding.PartitionSpec(None, AXIS)
        )

        _, *logical = self.mesh.axis_names
        factors = prime_factors(self.replicas) or [1]
        self.factors = jax.sharding.Mesh(
            self.mesh.devices.reshape(*factors, *self.mesh.devices.shape[1:]),
            (*(f"{AXIS}_{i}" for i in range(len(factors))), *logical),
        )
        if cluster is not None:
            _of_mesh[self.mesh] = _of_mesh[self.factors] = self

    def _set_mesh(self) -> jax.sharding.Mesh:
        """Tells Keras the mesh of the replicas' devices, and returns it as JAX's."""
        devices = self.devices
        if self.cluster is not None:
            workers, names = range(self.cluster.size), self.topology.devices
            devices = [d for rank in workers for d in devices_of_worker(rank, names)]
        # Named as JAX names them, which is what Keras looks for.
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
        if self._home_mesh is not None and not is_on_read(variable):
            axes = [None] * len(variable.shape)
            return keras.distribution.TensorLayout(axes, self._home_mesh)
        split = self._splitting.of(variable)
        note_split(variable, split)
        if split is not None and split.dimension is None and split.parts > 1:
            return self._in_parts(split)
        dimension = None if split is None else split.dimension
        axes = [AXIS if i == dimension else None for i in range(len(variable.shape))]
        return keras.distribution.TensorLayout(axes, self.device_mesh)

    def _split_of(self, variable: Any) -> Split | None:
        """How our devices share a variable; None if it is whole."""
        split, strategy = split_of(variable), strategy_of_variable(variable)
        if split is None or strategy is None:
            return None
        group = strategy.extended.group
        return split if getattr(group, "distribution", None) is self else None

    def dimension_of(self, variable: Any) -> int | None:
        """Along which dimension all our devices share a variable.

        None if it is whole, or in fewer parts: those are gathered for a program of
        `run` before it begins.
        """
        split = self._split_of(variable)
        return None if split is None else split.dimension

    def sharding_of(self, variable: Any) -> jax.sharding.NamedSharding:
        """How a variable lies on our devices."""
        split = self._split_of(variable)
        return self.everywhere if split is None else self._in_parts(split)

    def kept_as(self, variable: Any) -> jax.sharding.NamedSharding:
        """How a variable lies on devices between programs."""
        return self.home or self.sharding_of(variable)

    def fetched(self, arrays: Any) -> Any:
        """A structure of arrays on all devices, in memory that a step may overwrite."""

        def fetch(x):
            if not isinstance(x, jax.Array) or isinstance(x, Tracer):
                return x
            return jax.device_put(x, self.everywhere, may_alias=False)

        return keras.tree.map_structure(fetch, arrays)

    def kept(self, arrays: Any) -> Any:
        """A structure of arrays on the device that keeps them, if there is one."""

        def keep(x):
            if not isinstance(x, jax.Array) or isinstance(x, Tracer):
                return x
            return jax.device_put(x, self.home)

        if self.home is None:
            return arrays
        return keras.tree.map_structure(keep, arrays)

    def _in_parts(
        self, split: Split, logical: Sequence[tuple[str, ...]] = ()
    ) -> jax.sharding.NamedSharding:
        """The layout of what our devices share.

        Args:
            split: How.
            logical: The axes of logical devices that split each dimension besides.
        """
        if split.dimension is not None:
            mesh, of_replicas = self.mesh, [(AXIS, split.dimension)]
        else:
            # The same devices in the same order: one program may have both meshes.
            mesh = self.mesh if split.parts == 1 else self.factors
            names = (f"{AXIS}_{i}" for i in range(len(split.by_factors)))
            of_replicas = list(zip(names, split.by_factors, strict=True))
        axes = dict(enumerate(logical))
        for name, dimension in reversed(of_replicas):
            if dimension is not None:
                axes[dimension] = (name, *axes.get(dimension, ()))
        spec = [axes.get(i, ()) for i in range(1 + max(axes, default=-1))]
        # As JAX writes what one axis splits, or none.
        spec = [own if len(own) > 1 else own[0] if own else None for own in spec]
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))

    def place_batch(self, batch: Any, steps_in_front: bool = False) -> Any:
        """Puts a batch's arrays on the devices, split by rows where they can be.

        A sparse matrix is computed whole on each of them: what it stores is in no
        order of rows.

        Args:
            batch: A structure of arrays and None, or this worker's rows of one.
            steps_in_front: Whether the rows are the second axis, after the steps that
                Keras computes in one go.
        """
        if isinstance(batch, OwnRows):
            return keras.tree.map_structure(
                functools.partial(self._joined_rows, own=batch), batch.batch
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
            layout = split if even else self.everywhere
            if type(leaf) is np.ndarray:
                # What `jax.device_put` does, in half of its time.
                leaves[i] = jax.make_array_from_callback(
                    shape, layout, leaf.__getitem__
                )
            else:
                leaves[i] = put(leaf, layout)
        return keras.tree.pack_sequence_as(batch, leaves)

    def _joined_rows(self, leaf: Any, own: OwnRows) -> Any:
        """A global array of which each worker has its own rows, which do not travel."""
        if leaf is None:
            return None
        if own.total % self.replicas:
            return put(leaf, self.everywhere)

        first = own.bounds[0][0]

        def rows_of_device(index):
            rows, *others = index
            return leaf[(slice(rows.start - first, rows.stop - first), *others)]

        shape = (own.total, *leaf.shape[1:])
        return jax.make_array_from_callback(shape, self.split, rows_of_device)

    def joined(self, parts: Sequence[jax.Array]) -> jax.Array:
        """One array, split by rows, of which each of our devices has its part."""
        rows, *others = parts[0].shape
        return self.global_array((self.replicas * rows, *others), self.split, parts)

    def global_array(
        self,
        shape: tuple[int, ...],
        sharding: jax.sharding.NamedSharding,
        parts: Sequence[jax.Array],
    ) -> jax.Array:
        """An array of which each of our devices has one of these parts.

        Args:
            shape: The array's.
            sharding: `everywhere` or `split`.
            parts: What is on `devices`.
        """
        return jax.make_array_from_single_device_arrays(shape, sharding, list(parts))

    def noticing(
        self, batches: Iterable[Any], steps_in_front: bool = False
    ) -> Iterator[Any]:
        """The batches as they are; a warning where the devices do not divide them.

        A last batch that they do not divide is nothing to speak of.

        Args:
            batches: The batches.
            steps_in_front: See `place_batch`.
        """
        previous = 0
        rows = 1 if steps_in_front else 0
        for data in batches:
            if previous % self.replicas and not self._warned:
                self._warned = True
                logger.warning(
                    "Batches of %d rows cannot be split evenly over %d devices, so "
                    "every device computes all of their rows: the result is right, "
                    "and no faster than on one device. Choose a batch size that is a "
                    "multiple of %d.",
                    previous,
                    self.replicas,
                    self.replicas,
                )
            yield data
            if isinstance(data, OwnRows):
                previous = data.total
                continue
            first = data
            while isinstance(first, tuple | list) and first:
                first = first[0]
            if not hasattr(first, "shape"):  # None, or a structure of another kind
                arrays = (x for x in keras.tree.flatten(data) if hasattr(x, "shape"))
                first = next(arrays, None)
            shape = getattr(first, "shape", ())
            previous = shape[rows] if len(shape) > rows else 0

    def training(self) -> None:
        """Is told that weights are trained, which are there by now."""

    def warn_of_gathered_rows(self, counts: Sequence[int]) -> None:
        """Says, once, that the rows of a step travel to all workers."""
        if self._warned_of_gathering:
            return
        self._warned_of_gathering = True
        assert self.cluster is not None
        logger.warning(
            "In a step, rows that the workers have read travel to all of them (%s): a "
            "program of JAX's has as many rows on each of its devices. The result is "
            "right. Give each worker batches of as many rows, a multiple of %d.",
            self.cluster.listed(counts),
            len(self.devices),
        )

    def place(self, value: Any) -> Any:
        """Puts an array that is bound to other devices where our variables are."""
        where = self.home or self.everywhere
        if (
            isinstance(value, jax.Array)
            and not isinstance(value, Tracer)
            and value.committed
            and value.sharding.device_set != where.device_set
        ):
            return put(value, where)
        return value


def distribution_of(sharding: Any) -> ReplicaDistribution:
    """One of the distributions of several workers that have a layout's mesh."""
    return _of_mesh[sharding.mesh]


def put(value: Any, sharding: Any) -> Any:
    """`jax.device_put` of a value that every worker has whole.

    JAX would compare it between the workers first, which takes a collective for each
    value. And it has none for what is on the devices of all workers already.
    """
    if isinstance(value, Tracer) or sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    if isinstance(value, jax.Array):
        if value.sharding.is_equivalent_to(sharding, value.ndim):
            return value
        if not value.is_fully_addressable:
            return _moved(sharding)(value)
    else:
        value = np.asarray(value)
        value = value.astype(jax.dtypes.canonicalize_dtype(value.dtype), copy=False)
    parts = [
        # A program may overwrite it, under the hands of who has the value.
        jax.device_put(_part(value, index), device, may_alias=False)
        for device, index in sharding.addressable_devices_indices_map(
            value.shape
        ).items()
    ]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, parts)


def _part(value: Any, index: tuple[slice, ...]) -> Any:
    return value if all(s == slice(None) for s in index) else value[index]


@functools.cache
def _moved(sharding: Any) -> Any:
    return jax.jit(lambda x: x, out_shardings=sharding)
