"""Weights of which each replica stores a shard, and gathers what a layer reads.

This is stage 3 of ZeRO (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054).
The weights of successive layers form a unit. It is gathered when a layer reads one of
them, and released when another unit is. Autograd saves references to units in place of
weights, and gathers them again in the backward pass. When that has the gradients of a
unit, they are summed over the replicas, and each replica keeps those of its shard.

A variable's Parameter stays the leaf of autograd. It has the variable's shape, but no
memory: its elements read as NaN.
"""

import contextlib
import copy
import functools
import itertools
import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from keras_strategy.backends.threads.patches import MergedScope, current_thread_replica
from keras_strategy.backends.torch.gradient_buckets import FlatBufferPool
from keras_strategy.backends.torch.state import (
    GradientTerm,
    Layout,
    ShardedComponents,
    ShardedGradient,
    metadata_getters,
    shard_of,
    stand_in,
)
from keras_strategy.backends.torch.variables import COMPONENTS, ShardedVariable, retype
from keras_strategy.errors import MirrorError
from keras_strategy.keras_patches.internals import (
    current_stateless_scope,
    global_state,
    is_autocast,
    is_in_layer,
    stored_value,
)
from keras_strategy.training.saving import overridden_value
from keras_strategy.training.sharding import (
    FlatShards,
    OptimizerSharding,
    is_sharded,
    set_flat_shards,
)
from keras_strategy.training.variable_sync import is_sync_on_read

# A smaller unit costs more collectives, and a larger one more memory.
UNIT_BYTES = 4 << 20
# How many gathered tensors are remembered before those that are gone are forgotten.
_MAX_ORIGINS = 64

_thread_state = threading.local()
_engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore
_current_backward: Callable[[], int] = torch._C._current_graph_task_id  # pyright: ignore


@contextlib.contextmanager
def reading_leaves() -> Iterator[None]:
    """Context manager in which sharded variables read as their Parameters."""
    before = getattr(_thread_state, "is_reading_leaves", False)
    _thread_state.is_reading_leaves = True
    try:
        yield
    finally:
        _thread_state.is_reading_leaves = before


# --- reads


class WeightComponents(ShardedComponents):
    """The shards of a weight that this worker's replicas store, as part of a unit."""

    # `stored` is the Parameter that Keras has, and `tensors` are the shards.

    unit: "WeightUnit"
    offset: int  # in the gathered unit

    def __init__(self, variable: Any, layout: Layout):
        self.layout, self.path = layout, variable.path
        self.on_read, self.is_tracked = False, True
        self.writes = 0  # how often its value was changed
        self.shape, self.size = tuple(variable.shape), stored_value(variable).numel()
        self._set_variable(variable, stored_value(variable))

    def _set_variable(self, variable: Any, stored: torch.Tensor) -> None:
        self.variable, self.key = weakref.ref(variable), id(variable)
        self.stored = stored
        # What autograd has on each local replica in place of the weight.
        self.leaves = [stored] + [
            torch.nn.Parameter(stand_in(stored.detach(), device), stored.requires_grad)
            for device in self.layout.devices[1:]
        ]

    def __deepcopy__(self, memo: dict) -> "WeightComponents":
        """Return those of the variable's copy, with the same shards in a new unit."""
        copied = memo[id(self)] = copy.copy(self)
        variable = memo[id(self.variable())]  # has no attributes yet
        copied._set_variable(variable, copy.deepcopy(self.stored, memo))
        WeightUnit(self.unit.units, [copied])._store([self.shards], [self.tensors])
        copied.track_gradients()
        return copied

    def track_gradients(self) -> None:
        """Free the Parameter's memory, and observe the gradients of the leaves."""
        self.stored.data = stand_in(self.stored)
        for index, leaf in enumerate(self.leaves):
            call = functools.partial(_on_gradient, weakref.ref(self), index)
            leaf.register_hook(functools.partial(call, False))
            leaf.register_post_accumulate_grad_hook(functools.partial(call, True))

    def set_shards(self, shards: FlatShards, tensors: Sequence[torch.Tensor]) -> None:
        self.shards, self.tensors, self.first = shards, list(tensors), tensors[0]
        set_flat_shards(self.variable(), shards)
        self.version = self.first._version

    def all_tensors(self) -> Sequence[torch.Tensor]:
        return [*self.tensors, *self.leaves]

    def check_mirrored(self, variable: Any) -> None:
        """Do nothing: no replica stores what another one does."""

    def assign_each(self, values: Sequence[torch.Tensor]) -> None:
        super().assign_each(values)
        self.unit.note_writes([self])

    def shard_to_write(self, replica: Any, value: torch.Tensor) -> torch.Tensor:
        if current_thread_replica() is replica:  # all replicas are in a `merge_call`
            replica.unit_reads.prepare_write(self, value.detach())
        replica.unit_reads.note_writes([self])
        return super().shard_to_write(replica, value)

    def seen_value(self, local: torch.Tensor) -> torch.Tensor:
        return UngatheredWeight(self)

    def current_value(self, variable: Any) -> torch.Tensor | None:
        if getattr(_thread_state, "is_reading_leaves", False):
            return None
        scope, replica = current_stateless_scope(), current_thread_replica()
        if isinstance(scope, MergedScope):
            return self.full_values(scope.components(variable))[0]
        if (
            replica is None
            and scope is not None
            and scope.get_current_value(variable) is not None
        ):
            return None
        override = overridden_value(variable)
        if override is not None:
            return keras.ops.convert_to_tensor(override)
        if not is_in_layer():
            return UngatheredWeight(self)
        cast, dtype = global_state.get_global_attribute("autocast_scope"), None
        if cast is not None and cast.dtype is not None and is_autocast(variable):
            dtype = getattr(torch, cast.dtype)
        return self.read(dtype)

    def leaf(self, replica: Any) -> torch.Tensor:
        """Return what has the gradient of a replica, if one runs."""
        reads = None if replica is None else replica.unit_reads
        if replica is not None and (
            reads is None or reads.units is not self.unit.units
        ):
            raise ValueError(
                f"The variable '{self.path}' is sharded by another strategy than that "
                f"whose `run` uses it, {replica.context.strategy!r}. Create it in the "
                "scope of the strategy that runs the function."
            )
        leaf = self.leaves[0 if replica is None else replica.index]
        if leaf.requires_grad != self.stored.requires_grad:  # frozen or unfrozen
            leaf.requires_grad_(self.stored.requires_grad)
        return leaf

    def read(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the gathered weight, as the current replica sees it."""
        replica = current_thread_replica()
        leaf = self.leaf(replica)
        with torch.no_grad():
            flat = self.unit.gather(replica, dtype)
            value = flat[self.offset : self.offset + self.size].view(self.shape)
        if not (leaf.requires_grad and torch.is_grad_enabled()):
            return value
        if replica is not None:
            replica.unit_reads.expect_gradient(self)
        return _Read.apply(leaf, value)


class _Read(torch.autograd.Function):
    """A gathered weight, whose gradient is that of its leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.dtype = leaf.dtype
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].to(ctx.dtype), None


def unit_of(variable: Any) -> "WeightUnit | None":
    """Return the unit of a variable, if it is a sharded weight."""
    components = vars(variable).get(COMPONENTS)
    return components.unit if isinstance(components, WeightComponents) else None


class UngatheredWeight(torch.Tensor):
    """A weight that was read outside of layers, gathered by the first operation."""

    # Most such reads are of a gradient.

    _components: WeightComponents

    @staticmethod
    def __new__(cls, components: WeightComponents):
        leaf = components.leaf(current_thread_replica())
        self = leaf.detach().as_subclass(cls)
        self._components = components
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args=(), kwargs=None) -> Any:
        first, kwargs = args[0] if args else None, kwargs or {}
        replica = current_thread_replica()
        if isinstance(first, cls):
            if func in _of_leaves():
                leaf = first._components.leaf(replica)
                with torch._C.DisableTorchFunctionSubclass():
                    return func(leaf, *args[1:], **kwargs)
            name = func.__name__
            if name.endswith("_") and not name.startswith("_"):
                raise RuntimeError(
                    f"`{name}` would change a copy of the variable "
                    f"'{first._components.path}', which is sharded over the replicas. "
                    "Use `variable.assign(value)`."
                )
        is_differentiated = func is torch.autograd.grad

        def replace(leaf):
            if not isinstance(leaf, cls):
                return leaf
            components = leaf._components
            return components.leaf(replica) if is_differentiated else components.read()

        args, kwargs = pytree.tree_map(replace, (args, kwargs))
        return func(*args, **kwargs)


@functools.cache
def _of_leaves() -> frozenset[Any]:
    """Return what a weight's leaf answers, without its elements."""
    tensor: Any = torch.Tensor
    return metadata_getters() | {
        *(tensor.grad.__get__, tensor.grad.__set__, tensor.grad.__delete__),
        *(tensor.requires_grad.__set__, tensor.requires_grad_),
        *(tensor.register_hook, tensor.register_post_accumulate_grad_hook),
    }


# --- units


class WeightUnit:
    """Weights that are gathered together."""

    # The gathered tensor has the first replica's shards of all weights, then those of
    # the second, and so on. In it each weight is in one piece.

    def __init__(self, units: "WeightUnits", weights: Sequence[WeightComponents]):
        self.units, self.weights = units, list(weights)
        self.number = next(units.numbers)  # the same on all workers
        self.has_slots = False  # of optimizers, with the weights' shards
        self._has_owners = False  # one replica for each weight
        # With the versions of the tensors, which layers must not change.
        self._gathered: dict[Any, tuple[torch.Tensor, int]] = {}
        for weight in weights:
            weight.unit = self

    def split_evenly(self, values: Sequence[torch.Tensor]) -> None:
        """Store one piece of all weights on each replica."""
        shapes = [weight.shape for weight in self.weights]
        self._split(values, even_shards(shapes, self.units.topology.num_replicas))

    def prepare_slot(self, variable: Any, sharding: OptimizerSharding) -> None:
        """Move a weight to one replica if an optimizer needs all of it."""
        if sharding.elementwise or self._has_owners:
            self.has_slots = True
            return
        if any(self.units.reads):
            raise RuntimeError(
                "An optimizer that needs whole weights, such as Muon, must be built "
                "before it is used in `strategy.run`. Call "
                "`optimizer.build(model.trainable_variables)` when the model is made."
            )
        unit = self
        if self.has_slots and len(self.weights) > 1:
            # Other weights stay where their slots are.
            weight = vars(variable)[COMPONENTS]
            self.weights.remove(weight)
            self._store(
                [w.shards for w in self.weights], [w.tensors for w in self.weights]
            )
            self.note_writes(self.weights)
            unit = WeightUnit(self.units, [weight])
        unit._split_by_owners(sharding)

    def _split_by_owners(self, sharding: OptimizerSharding) -> None:
        self._has_owners = self.has_slots = True
        values = [weight.full_values(weight.tensors)[0] for weight in self.weights]
        shards = [sharding.whole_on_owner(w.variable(), w.shape) for w in self.weights]
        self._split(values, shards)
        self.note_writes(self.weights)

    def _split(
        self, values: Sequence[torch.Tensor], shards: Sequence[FlatShards]
    ) -> None:
        local = self.units.topology.local_replicas
        pairs = zip(values, shards, strict=True)
        self._store(shards, [[shard_of(v, s, r) for r in local] for v, s in pairs])

    @torch.no_grad()
    def _store(
        self, shards: Sequence[FlatShards], parts: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        """Store the local replicas' shards of each weight."""
        replicas = range(self.units.topology.num_replicas)
        self.sizes = [sum([s.size_of(r) for s in shards]) for r in replicas]
        by_replica = list(zip(*parts, strict=True))
        # Copied, as views would keep the memory of whole weights.
        self.flats = [
            torch.cat([part.reshape(-1) for part in of_all]).to(device)
            for of_all, device in zip(
                by_replica, self.units.layout.devices, strict=True
            )
        ]
        views = [
            flat.split([part.numel() for part in of_all])
            for flat, of_all in zip(self.flats, by_replica, strict=True)
        ]
        for index, (weight, shard) in enumerate(zip(self.weights, shards, strict=True)):
            first = next((r for r in replicas if shard.size_of(r)), 0)
            before = sum([other.size_of(first) for other in shards[:index]])
            weight.offset = sum(self.sizes[:first]) + before
            pairs = zip(views, parts[index], strict=True)
            weight.set_shards(shard, [v[index].view(part.shape) for v, part in pairs])

    def gather(self, replica: Any, dtype: torch.dtype | None) -> torch.Tensor:
        """Return the flat values of all weights; all replicas call it."""
        units, index = self.units, 0 if replica is None else replica.index
        if replica is not None and self in replica.unit_reads.written:
            replica.unit_reads.wait_for_writes()
        device = units.layout.devices[index]
        key = device, dtype
        flat, _ = self._gathered.get(key, (None, 0))
        if flat is None:
            units.release_all_but(self)
            parts = [part.to(device, dtype) for part in self._local_parts(replica)]
            flat = parts[0] if len(parts) == 1 else torch.cat(parts)
            if units.layout.workers is not None:
                flat = self._gather_from_workers(replica, flat)
            self._gathered[key] = flat, flat._version
            units.remember(flat, self, dtype)
        return flat

    def _gather_from_workers(self, replica: Any, flat: torch.Tensor) -> torch.Tensor:
        workers: Any = self.units.layout.workers
        prefetch = None if replica is None else self.units.prefetch
        started = None if prefetch is None else prefetch.take(self, flat.dtype)
        name = f"the weights of unit {self.number} '{self.weights[0].path}'"
        workers.verify(name, flat, ())
        if started is None:
            sizes, buffers = self.worker_sizes(), self.units.buffers
            started = workers.start_gather(name, flat, sizes, buffers)
        gathered = started()
        if prefetch is not None:
            prefetch.start_next()
        return gathered

    def worker_sizes(self) -> tuple[int, ...]:
        """Return the numbers of elements of which each worker stores the shards."""
        local = len(self.units.layout.devices)
        firsts = range(0, len(self.sizes), local)
        return tuple([sum(self.sizes[first : first + local]) for first in firsts])

    def _local_parts(self, replica: Any) -> Sequence[torch.Tensor]:
        """Return the flat shards of the local replicas, as a run has left them."""
        scopes = [] if replica is None else replica.unit_reads.scopes
        keys = [weight.key for weight in self.weights]
        if not any(key in scope.state_mapping for scope in scopes for key in keys):
            return self.flats
        by_replica = zip(scopes, *[w.tensors for w in self.weights], strict=True)
        return [
            torch.cat(
                [
                    scope.state_mapping.get(weight.key, tensor).detach().reshape(-1)
                    for weight, tensor in zip(self.weights, tensors, strict=True)
                ]
            )
            for scope, *tensors in by_replica
        ]

    def note_writes(self, weights: Iterable[WeightComponents]) -> None:
        """Release what was gathered before some of the weights were written."""
        for weight in weights:
            weight.writes += 1
        self.release()
        if self.units.prefetch is not None:
            self.units.prefetch.drop(self)

    def weight_at(self, offset: int) -> WeightComponents:
        """Return the weight that has an element of the gathered tensor."""
        return next(
            weight
            for weight in self.weights
            if weight.offset <= offset < weight.offset + weight.size
        )

    def release(self) -> None:
        gathered = self._gathered.values()
        changed = any(flat._version != version for flat, version in gathered)
        self._gathered.clear()
        if changed:
            raise RuntimeError(
                "A layer has changed a copy of a weight in place. The weights are "
                "sharded over the replicas: use `variable.assign(value)`. It is one of "
                f"{[weight.path for weight in self.weights]}."
            )


class _UnitGather(NamedTuple):
    """A gather of a unit, which some workers may have deleted and others not yet."""

    number: int
    dtype: torch.dtype
    sizes: tuple[int, ...]  # of the workers' shards
    unit: "weakref.ref[WeightUnit]"


class UnitPrefetch:
    """Gathers, while a layer computes, the unit that came next in the last run."""

    # Workers that have gathered the same units before prefetch the same one. It is
    # verified when it is read, as others are.

    def __init__(self, units: "WeightUnits"):
        self._workers: Any = units.layout.workers
        self._device, self._buffers = units.layout.devices[0], units.buffers
        self._last_order: list[_UnitGather] = []  # in the last run
        self._order: list[_UnitGather] = []  # in this one
        self._number: int | None = None  # of the unit that is being gathered
        self._finish: Any = None  # waits for it

    def end_run(self) -> None:
        self._last_order, self._order = self._order, []
        self._finish_unread()

    def drop(self, unit: WeightUnit) -> None:
        """Forget the gather of a unit whose weights are written."""
        if unit.number == self._number:
            self._finish_unread()

    def _finish_unread(self) -> None:
        """Wait for a gather that nothing reads: the other workers are still sending."""
        finish, self._number, self._finish = self._finish, None, None
        if finish is not None:
            finish()

    def take(
        self, unit: WeightUnit, dtype: torch.dtype
    ) -> Callable[[], torch.Tensor] | None:
        """Return what waits for the unit, if it is being gathered."""
        position = len(self._order)
        sizes = unit.worker_sizes()
        self._order.append(_UnitGather(unit.number, dtype, sizes, weakref.ref(unit)))
        last = [gather[:3] for gather in self._last_order[position : position + 1]]
        is_expected = last == [(unit.number, dtype, sizes)]
        if not is_expected:
            self._last_order = []  # this run takes another way
        started = self._finish if is_expected and unit.number == self._number else None
        if started is None:
            self._finish_unread()
        self._number = self._finish = None
        return started

    def start_next(self) -> None:
        """Start the gather that came next in the last run."""
        for number, dtype, sizes, ref in self._last_order[len(self._order) :][:1]:
            unit = ref()
            if unit is not None and unit.worker_sizes() == sizes:
                flat = unit.flats[0].to(dtype=dtype)
            else:  # no worker will read it
                size = sizes[self._workers.rank]
                flat = torch.zeros(size, dtype=dtype, device=self._device)
            name = f"the weights of unit {number}"
            self._number = number
            self._finish = self._workers.start_gather(name, flat, sizes, self._buffers)


class WeightUnits:
    """The units of a strategy, and which of them are gathered."""

    exist = False  # True if any have been created

    def __init__(self, layout: Layout):
        WeightUnits.exist = True
        self.layout, self.topology = layout, layout.topology
        self.numbers = itertools.count()
        workers: Any = layout.workers
        # Of the gathered unit, or of the gradients that a worker sends, in a run.
        self.buffers = FlatBufferPool(max_buffers=1)
        self.prefetch: UnitPrefetch | None = None
        first, *others = layout.devices
        if workers is not None and not others and workers.can_overlap(first):
            self.prefetch = UnitPrefetch(self)
        # Of the local replicas that run.
        self.reads: list[ReplicaReads | None] = [None] * len(layout.devices)
        # Where the sums of the replicas' shards are collected.
        self.shard_devices = [layout.devices[0]] * self.topology.num_replicas
        for replica, device in zip(
            self.topology.local_replicas, layout.devices, strict=True
        ):
            self.shard_devices[replica] = device
        self._gathered: Any = None  # a weak reference to the unit
        # Of gathered tensors, by the addresses of their memory.
        self._origins: dict[int, tuple[StorageWeakRef, Any, torch.dtype | None]] = {}

    def shard(self, variables: Sequence[Any]) -> None:
        """Make units of new weights, given in the order of layers."""
        for weights in group_into_units(variables):
            self._make_unit(weights)

    def _make_unit(self, variables: Sequence[Any]) -> None:
        weights = [WeightComponents(variable, self.layout) for variable in variables]
        unit = WeightUnit(self, weights)
        unit.split_evenly([weight.stored.detach() for weight in weights])
        for variable, weight in zip(variables, weights, strict=True):
            weight.track_gradients()
            vars(variable)[COMPONENTS] = weight
            retype(variable, ShardedVariable)

    def release_all_but(self, unit: WeightUnit) -> None:
        """Release the unit that is gathered, if it is another one."""
        gathered = None if self._gathered is None else self._gathered()
        if gathered is not None and gathered is not unit:
            gathered.release()
        self._gathered = weakref.ref(unit)

    def end_run(self) -> None:
        self.release()
        self.buffers.clear()
        if self.prefetch is not None:
            self.prefetch.end_run()

    def release(self) -> None:
        gathered, self._gathered = self._gathered, None
        if gathered is not None and gathered() is not None:
            gathered().release()

    def remember(
        self, flat: torch.Tensor, unit: WeightUnit, dtype: torch.dtype | None
    ) -> None:
        """Remember the unit of a gathered tensor."""
        if len(self._origins) > _MAX_ORIGINS:
            self._origins = {
                address: origin
                for address, origin in self._origins.items()
                if not origin[0].expired()
            }
        storage = flat.untyped_storage()
        origin = StorageWeakRef(storage), weakref.ref(unit), dtype
        self._origins[storage.data_ptr()] = origin

    def origin_of(self, tensor: torch.Tensor) -> tuple[Any, torch.dtype | None] | None:
        """Return the unit and dtype that a tensor is a part of, or None."""
        if tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        origin = self._origins.get(storage.data_ptr())
        if origin is None or origin[0] != StorageWeakRef(storage):
            return None
        return origin[1](), origin[2]


def even_shards(shapes: Sequence[tuple[int, ...]], replicas: int) -> list[FlatShards]:
    """Return the shards of a unit's weights, one piece of all of them per replica."""
    piece = -(-sum(map(math.prod, shapes)) // replicas)
    shards, begin = [], 0
    for shape in shapes:
        size = math.prod(shape)
        ends = [min(max(piece * r - begin, 0), size) for r in range(replicas)]
        shards.append(FlatShards(shape, tuple(itertools.pairwise([*ends, size]))))
        begin += size
    return shards


def group_into_units(variables: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield the weights of each unit, given variables in the order of layers."""
    weights: list[Any] = []
    for variable in variables:
        if not _is_weight(variable):
            continue
        if is_unit_complete([*weights, variable]):
            yield weights
            weights = []
        weights.append(variable)
    if weights:
        yield weights


def attach_unit_shards(
    variables: Sequence[Any], replicas: int, by_weight: OptimizerSharding | None
) -> None:
    """Attach the shards that new weights would have, even or each on one replica."""
    for unit in list(group_into_units(variables)):
        shapes = [tuple(weight.shape) for weight in unit]
        if by_weight is None:
            shards = even_shards(shapes, replicas)
        else:
            shards = list(map(by_weight.whole_on_owner, unit, shapes))
        for weight, of_weight in zip(unit, shards, strict=True):
            set_flat_shards(weight, of_weight)


def is_unit_complete(variables: Sequence[Any]) -> bool:
    """Return True if the last of some new variables begins another unit."""
    weights = list(filter(_is_weight, variables))
    if len(weights) < 2 or weights[-1] is not variables[-1]:
        return False
    *before, last = weights
    size = sum([stored_value(weight).nbytes for weight in before])
    return last.dtype != before[-1].dtype or (
        size >= UNIT_BYTES and _layer_path(last) != _layer_path(before[-1])
    )


def _is_weight(variable: Any) -> bool:
    return (
        variable.trainable
        and stored_value(variable).ndim > 0  # Nadam has a trainable scalar
        and not is_sharded(variable)
        and not is_sync_on_read(variable)
        and not variable.overwrite_with_gradient
        and stored_value(variable).is_floating_point()
    )


def _layer_path(variable: Any) -> str:
    return variable.path.rpartition("/")[0]


def _is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two tensors are equal, and NaN where the other is."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


# --- gradients


def _on_gradient(weight: Any, index: int, is_accumulated: bool, _: Any) -> None:
    """Handle a new gradient of a replica's leaf, before or after it is added to it."""
    weight = weight()
    reads = None if weight is None else weight.unit.units.reads[index]
    if reads is None:  # outside of runs, the leaf gets the whole gradient
        if weight is not None and isinstance(
            weight.leaves[index].grad, ShardedGradient
        ):
            raise RuntimeError(
                f"The gradient of '{weight.path}' is that of a step in `strategy.run`, "
                "of which each replica has a shard. Call `model.zero_grad()` before "
                "`backward` outside of the strategy."
            )
        return
    if is_accumulated:
        reads.note_gradient(weight)
    else:
        reads.set_aside(weight)


class _Saved(NamedTuple):
    """A reference to what autograd would save."""

    weight: WeightComponents
    dtype: torch.dtype | None
    writes: int  # of the weight, before it was read
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # in the weight


class _BackwardPass:
    """The weights of a unit that have a gradient, or will get one."""

    def __init__(self) -> None:
        self.expected: set[WeightComponents] = set()  # those that were read
        self.pending: set[WeightComponents] = set()
        # Terms of gradients of earlier passes.
        self.arrived: dict[WeightComponents, list[GradientTerm]] = {}
        self.is_closed = True


class ReplicaReads:
    """A replica's reads of units in a run, and the gradients of what it has read."""

    # `scopes` are those of the local replicas that stage what they write, and `sums`
    # the terms that they add up.

    def __init__(
        self,
        units: WeightUnits,
        replica: Any,
        scopes: Sequence[Any],
        sums: dict[Any, GradientTerm],
    ):
        self.units, self._replica = units, replica
        self.scopes, self._sums = scopes, sums
        # Units of which other replicas may have to write their shards yet.
        self.written: set[WeightUnit] = set()
        self._passes: dict[WeightUnit, _BackwardPass] = {}
        self._counts: Counter[WeightUnit] = Counter()  # of reductions
        self._backward = -1  # the last backward pass, as autograd counts them

    def track(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replica's function, with its reads and gradients tracked."""

        def tracked(*args, **kwargs):
            reads, index = self.units.reads, self._replica.index
            reads[index] = self
            try:
                with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                    return fn(*args, **kwargs)
            finally:
                reads[index] = None
                self._passes.clear()  # the replica is part of a reference cycle

        return tracked

    def wait_for_writes(self) -> None:
        """Let the other replicas write what this one has written."""
        self._replica.exchange("a read of sharded weights", None, lambda values: None)
        self.written.clear()

    def prepare_write(self, weight: WeightComponents, value: torch.Tensor) -> None:
        """Let the other replicas read a weight, and check that they write the same."""
        workers, step = self.units.layout.workers, self._replica.step

        def check(values):
            first, *others = values
            same = all(_is_equal(first, other.to(first.device)) for other in others)
            if same and workers is not None and not step.is_applying:
                name = f"an assignment to '{weight.path}'"
                same = workers.broadcast_if_different(name, [first]) == [None]
            if not same:
                raise MirrorError(
                    "All replicas must assign the same value to a sharded weight, of "
                    "which each writes its shard. They assign different values to "
                    f"'{weight.path}'. Reduce the value first with "
                    "`keras_strategy.get_replica_context().all_reduce`."
                )

        self._replica.exchange("an assignment to sharded weights", value, check)

    def note_writes(self, weights: Iterable[WeightComponents]) -> None:
        for weight in weights:
            weight.unit.note_writes([weight])
            self.written.add(weight.unit)

    def expect_gradient(self, weight: WeightComponents) -> None:
        """Note that the backward pass will bring a weight's gradient."""
        entry = self._passes.setdefault(weight.unit, _BackwardPass())
        if entry.is_closed and _current_backward() == -1:
            entry.expected, entry.is_closed = set(), False
        entry.expected.add(weight)
        entry.pending.add(weight)

    def _pack(self, tensor: torch.Tensor) -> Any:
        unit, dtype = self.units.origin_of(tensor) or (None, None)
        if unit is None or tensor.numel() == 0:
            return tensor
        start = int(tensor.storage_offset())
        weight = unit.weight_at(start)
        size, stride, offset = tensor.size(), tensor.stride(), start - weight.offset
        return _Saved(weight, dtype, weight.writes, size, stride, offset)

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _Saved):
            return saved
        weight = saved.weight
        if saved.writes != weight.writes:
            raise RuntimeError(
                f"The gradient needs the value of the weight '{weight.path}' before it "
                "was assigned. Call `backward` before you assign it."
            )
        with torch.no_grad():
            flat = weight.unit.gather(self._replica, saved.dtype)
        offset = weight.offset + saved.offset
        return flat.as_strided(saved.size, saved.stride, offset)

    def set_aside(self, weight: WeightComponents) -> None:
        """Keep the terms of a gradient to which torch cannot add another one."""
        leaf = weight.leaves[self._replica.index]
        if isinstance(leaf.grad, ShardedGradient):
            entry = self._passes.setdefault(weight.unit, _BackwardPass())
            entry.arrived[weight] = leaf.grad.terms
            leaf.grad = None

    def note_gradient(self, weight: WeightComponents) -> None:
        """Reduce the gradients of a unit if this one is the last."""
        backward = _current_backward()
        if backward != self._backward:
            self._backward = backward
            _engine.queue_callback(self._flush)
        entry = self._passes.setdefault(weight.unit, _BackwardPass())
        entry.pending.discard(weight)
        entry.arrived.setdefault(weight, [])
        if not entry.pending:
            self._reduce(weight.unit, entry)

    def _flush(self) -> None:
        """Reduce what has come at the end of a backward pass; more will not."""
        for unit, entry in self._passes.items():
            if entry.arrived:
                self._reduce(unit, entry)
            entry.pending, entry.is_closed = set(), True
        self.units.buffers.clear()  # the optimizer may need the memory

    @torch.no_grad()
    def _reduce(self, unit: WeightUnit, entry: _BackwardPass) -> None:
        unit.release()
        index, step = self._replica.index, self._replica.step
        weights = [weight for weight in unit.weights if weight in entry.arrived]
        leaves = [weight.leaves[index] for weight in weights]
        gradients = []
        for leaf in leaves:
            gradients.append(leaf.grad.to_dense())
            leaf.grad = None
        number = self._counts[unit]
        self._counts[unit] += 1
        terms = []
        if self.scopes:
            devices = self.units.shard_devices
            for weight, gradient in zip(weights, gradients, strict=True):
                term = self._sums.setdefault((weight, number), GradientTerm())
                term.add(gradient, step.row_weight, weight.shards, devices)
                terms.append(term)
        else:
            workers: Any = self.units.layout.workers
            shards = workers.reduce_scatter_weighted(
                gradients,
                step.row_weight,
                [weight.shards for weight in weights],
                self.units.buffers,
            )
            terms = [GradientTerm({self._replica.id: shard}, True) for shard in shards]
        for weight, leaf, term in zip(weights, leaves, terms, strict=True):
            leaf.grad = ShardedGradient(leaf, [*entry.arrived[weight], term])
        entry.arrived, entry.pending = {}, set(entry.expected)
        entry.is_closed = True
