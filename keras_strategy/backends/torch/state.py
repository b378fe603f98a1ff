"""The components of a variable: one tensor on each replica's device.

The first is the Parameter that Keras created, so a variable that is read in
cross-replica context, saved or passed to torch code is an ordinary one.

Keras sends every read and assignment in a replica to the thread's `StatelessScope`.
Ours reads the replica's component, stages what is assigned, and commits it when all
replicas have succeeded.

Of an optimizer's variable each replica may store a shard only, since it updates only
its shard of the weights.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import torch

from keras_strategy.backends.threads.patches import (
    MergedScope,
    ReplicaScope,
    current_thread_replica,
    unbuilt_variable_error,
)
from keras_strategy.backends.torch.collectives import TorchWorkers, map_flattened
from keras_strategy.backends.torch.gradient_buckets import scale_in_place
from keras_strategy.backends.torch.variables import COMPONENTS, ShardedVariable, retype
from keras_strategy.core import context
from keras_strategy.devices import ReplicaTopology
from keras_strategy.errors import MirrorError
from keras_strategy.keras_patches.internals import (
    current_stateless_scope,
    initialize,
    stored_value,
)
from keras_strategy.training import ownership
from keras_strategy.training.reduction import sum_in_tree
from keras_strategy.training.saving import overridden_value
from keras_strategy.training.sharding import FlatShards, set_flat_shards
from keras_strategy.training.variable_sync import (
    is_sync_on_read,
    local_summands,
    no_value_error,
    split_for_local_replicas,
)


@dataclass(frozen=True)
class Layout:
    """Placement of a strategy's replicas; devices have torch's names."""

    devices: tuple[str, ...]
    workers: TorchWorkers | None
    topology: ReplicaTopology
    home: str | None  # the device that stores all variables, if one does

    def __deepcopy__(self, memo: dict) -> "Layout":
        return self  # the copy of a variable uses the same workers

    @functools.cached_property
    def owners(self) -> tuple[int, ...]:
        """The replica whose tensors each of the local ones uses."""
        if not self.topology.sums_in_tree:
            return tuple(range(len(self.devices)))
        return tuple(map(self.devices.index, self.devices))

    @functools.cached_property
    def shares_tensors(self) -> bool:
        """True if several replicas of a device use the tensors of one."""
        return len(set(self.owners)) < len(self.owners)

    def sum(self, name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sum the local replicas' tensors with the other workers'; return a new one."""
        if not self.topology.sums_in_tree:
            if self.workers is not None and len(tensors) == 1:
                return self.workers.sum(name, tensors[0])
            total = sum_tensors(tensors)
            return total if self.workers is None else self.workers.sum(name, total)
        local = [tensor.detach().to(tensors[0].device) for tensor in tensors]
        if self.workers is not None:
            return self.workers.sum_in_tree(name, local)
        leaves = {range(i, i + 1): tensor for i, tensor in enumerate(local)}
        return sum_in_tree(range(len(local)), leaves, torch.add)

    def sum_logs(self, logs: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Sum several values in one collective, given those of each local replica."""
        if not (self.topology.sums_in_tree and logs):
            sums = list(map(sum_tensors, logs))
            return sums if self.workers is None else self.workers.sum_all("logs", sums)
        logs = [[t.to(parts[0].device) for t in parts] for parts in logs]
        by_replica = zip(*logs, strict=True)
        return map_flattened(lambda *flats: self.sum("logs", flats), *by_replica)


class Components:
    """The tensors of one variable, and the version of the first."""

    shards: FlatShards | None = None  # what each replica stores; None for all
    is_central = False  # True if one device stores the variable for all replicas
    run: object = None  # the last one that has used them

    def __init__(self, variable: Any, layout: Layout):
        self.layout = layout
        self.on_read = is_sync_on_read(variable)
        # True if replicas record their reads, see `StepState`.
        self.is_tracked = variable.aggregation == "sum" and not self.on_read
        self.first = stored_value(variable)
        self.tensors = [self.first]
        # One for all replicas. Each works on a copy while it runs.
        self.is_central = layout.home is not None and not self.on_read
        if self.is_central:
            self.tensors *= len(layout.devices)
            self.version = 0
            return
        first, requires_grad = self.first.detach(), self.first.requires_grad
        for index, device in enumerate(layout.devices[1:], 1):
            self.tensors.append(
                self.tensors[layout.owners[index]]
                if self.is_shared(index)
                else torch.nn.Parameter(first.to(device, copy=True), requires_grad)
            )
        self.version = self.first._version
        if self.on_read:
            # The replicas' values must aggregate to the initial one.
            self.assign(variable, first.clone())

    def is_shared(self, index: int) -> bool:
        """Return True if a local replica uses the tensor of another one."""
        return not self.on_read and self.layout.owners[index] != index

    def all_tensors(self) -> Sequence[torch.Tensor]:
        """Return the tensors, and others that have the variable's gradients."""
        return self.tensors

    def refresh(self, variable: Any) -> None:
        """Copy the first component to the others if other code wrote to it."""
        # A torch optimizer, or code that modifies `variable.value`, writes only that.
        if self.first._version == self.version or self.on_read or self.is_central:
            return
        with torch.no_grad():
            for index, tensor in enumerate(self.tensors):
                if index and not self.is_shared(index):
                    tensor.copy_(self.first)
        self.version = self.first._version

    def check_mirrored(self, variable: Any) -> None:
        """Raise MirrorError if replicas wrote different values in place."""
        if self.on_read or self.is_central:
            return
        first, *others = [tensor.detach() for tensor in self.tensors]
        if not all(torch.equal(first, other.to(first.device)) for other in others):
            raise MirrorError(
                f"The tensor of the variable '{variable.path}' was changed in a step "
                "by code that does not synchronize replicas, such as a torch "
                "optimizer, and the replicas' values differ now. Apply the gradients "
                "with a Keras optimizer, `optimizer.apply(gradients, variables)`, "
                "which sums those of all replicas; or assign to the variable. The "
                "model holds the result of one replica's rows: load its weights again."
            )
        self.version = self.first._version

    def assign(self, variable: Any, value: torch.Tensor) -> None:
        """Assign a value in cross-replica context."""
        topology = self.layout.topology
        self.assign_each(split_for_local_replicas(variable, value.detach(), topology))

    def assign_each(self, values: Sequence[torch.Tensor]) -> None:
        """Assign one value per local replica, in cross-replica context."""
        with torch.no_grad():
            pairs = zip(self.tensors, values, strict=True)
            for index, (tensor, value) in enumerate(pairs):
                if not self.is_shared(index):
                    tensor.copy_(value)
        self.version = self.first._version

    def shard_to_write(self, replica: Any, value: torch.Tensor) -> torch.Tensor:
        """Return what a replica is about to write of a value."""
        return value

    def seen_value(self, local: torch.Tensor) -> torch.Tensor:
        """Return what Keras sees, given what a replica stores."""
        return local

    def full_values(self, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the value on each local replica, given what each stores."""
        # If it is sharded, all workers have to call this.
        return parts

    def aggregated_value(self, variable: Any) -> torch.Tensor:
        """Return a sync-on-read variable's value; all workers have to call this."""
        if variable.aggregation == "none":
            raise no_value_error(variable)
        summands = self.local_summands(variable)
        return self.layout.sum(f"the value of '{variable.path}'", summands)

    def local_summands(self, variable: Any) -> list[torch.Tensor]:
        """Return what the local replicas add to a sync-on-read variable's value."""
        with torch.no_grad():
            return local_summands(variable, self.tensors, self.layout.topology)


class ShardedComponents(Components):
    """The shards of a variable that this worker's replicas store."""

    # The tensor of the variable is replaced by the shard of the first of them.

    shards: FlatShards

    def __init__(self, variable: Any, layout: Layout, shards: FlatShards):
        full, self.shards, self.layout = stored_value(variable).detach(), shards, layout
        self.path, self.on_read = variable.path, False
        self.is_tracked = True  # reads need the full value
        self.tensors = [
            torch.nn.Parameter(
                shard_of(full, shards, replica).to(device, copy=True),
                requires_grad=False,
            )
            for replica, device in zip(
                layout.topology.local_replicas, layout.devices, strict=True
            )
        ]
        self.first = self.tensors[0]
        self.version = self.first._version
        set_flat_shards(variable, shards)
        initialize(variable, self.first)
        vars(variable)[COMPONENTS] = self
        retype(variable, ShardedVariable)

    def refresh(self, variable: Any) -> None:
        """Do nothing: no replica stores what another one does."""

    def shard_to_write(self, replica: Any, value: torch.Tensor) -> torch.Tensor:
        return shard_of(value, self.shards, replica.id)

    def assign_each(self, values: Sequence[torch.Tensor]) -> None:
        replicas = self.layout.topology.local_replicas
        pairs = zip(values, replicas, strict=True)
        super().assign_each([shard_of(value, self.shards, r) for value, r in pairs])

    def full_values(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        flat = torch.cat([part.detach().reshape(-1).to(self.first) for part in parts])
        if self.layout.workers is not None:
            name = f"the value of '{self.path}'"
            flat, _ = self.layout.workers.gather(name, flat, 0)
        full = flat.view(self.shards.shape)
        return [full.to(device) for device in self.layout.devices]

    def current_value(self, variable: Any) -> torch.Tensor | None:
        """Return the full value; all replicas and workers call this."""
        # Return None if the current scope has a value of its own: while the optimizer
        # updates its shard, and in a scope with the user's values.
        scope, replica = current_stateless_scope(), current_thread_replica()
        if isinstance(scope, MergedScope):
            return self.full_values(scope.components(variable))[0]
        if replica is not None:
            shard = replica.scope.local_value(variable).detach().reshape(-1)
            with torch.no_grad():
                return replica.all_gather(shard, 0).view(self.shards.shape)
        if scope is not None and scope.get_current_value(variable) is not None:
            return None
        override = overridden_value(variable)
        if override is not None:
            return keras.ops.convert_to_tensor(override)
        return self.full_values(self.tensors)[0]


def shard_of(full: torch.Tensor, shards: FlatShards, replica: int) -> torch.Tensor:
    """Return a replica's shard of a tensor, as a view if possible."""
    begin, end = shards.bounds[replica]
    return full.reshape(-1)[begin:end].view(shards.shape_of(replica))


def stand_in(
    tensor: torch.Tensor, device: str | torch.device | None = None
) -> torch.Tensor:
    """Return a tensor of the same shape that has no memory; its elements are NaN."""
    return tensor.new_full((), math.nan, device=device).expand(tensor.shape)


class GradientTerm:
    """The shards of a gradient of one backward pass, by the replicas' ids."""

    def __init__(
        self, shards: dict[int, torch.Tensor] | None = None, is_summed: bool = False
    ):
        self.shards = shards or {}
        self.is_summed = is_summed  # over all replicas; until then over local ones

    def add(
        self,
        gradient: torch.Tensor,
        weight: float | None,
        bounds: FlatShards,
        devices: Sequence[str],
    ) -> None:
        """Add a local replica's gradient, times its row weight."""
        for replica, device in enumerate(devices):
            shard = shard_of(gradient, bounds, replica).to(device, copy=True)
            # Before it is added, as a fused multiplication rounds otherwise: gradients
            # that cancel out would not.
            scale_in_place(shard, weight)
            total = self.shards.setdefault(replica, shard)
            if total is not shard:
                total.add_(shard)


class ShardedGradient(torch.Tensor):
    """The sum of a gradient over the replicas, of which each has a shard."""

    # Its own elements are NaN. The sum is that of `terms`.

    terms: list[GradientTerm]

    @staticmethod
    def __new__(cls, like: torch.Tensor, terms: Sequence[GradientTerm]):
        self = stand_in(like.detach()).as_subclass(cls)
        self.terms = list(terms)
        return self

    def __repr__(self) -> str:
        return f"ShardedGradient(shape={tuple(self.shape)})"

    def shard(self, replica: int) -> torch.Tensor:
        first, *others = [term.shards[replica] for term in self.terms]
        return sum(others, first)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args=(), kwargs=None) -> Any:
        first = args[0] if args else None
        if func in metadata_getters() and isinstance(first, cls):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})
        if (
            func in _scalings()
            and isinstance(first, cls)
            and all(term.is_summed for term in first.terms)
            and not any(torch.is_tensor(x) and x.numel() != 1 for x in args[1:])
        ):
            shards = {
                replica: func(first.shard(replica), *args[1:], **kwargs or {})
                for replica in first.terms[0].shards
            }
            like = next(iter(shards.values())).new_empty(()).expand(first.shape)
            return cls(like, [GradientTerm(shards, is_summed=True)])
        raise RuntimeError(
            f"`{getattr(func, '__name__', func)}` needs a whole gradient, but each "
            "replica has a shard of its sum, because of the strategy's `shard`. "
            "Pass gradients to `optimizer.apply` as they are. Clip them with the "
            "optimizer's `clipnorm`, `clipvalue` or `global_clipnorm`; or compute "
            "whole ones with `keras_strategy.value_and_grad`."
        )


@functools.cache
def metadata_getters() -> frozenset[Any]:
    """Return what is known of a tensor without its elements."""
    names = (
        "shape dtype device ndim requires_grad is_leaf layout is_meta is_sparse "
        "is_quantized is_cuda grad_fn"
    )
    tensor: Any = torch.Tensor
    return frozenset(
        [getattr(tensor, name).__get__ for name in names.split()]
        + [tensor.dim, tensor.size, tensor.numel, tensor.__len__, tensor.nelement]
        + [tensor.is_floating_point, tensor.is_complex, tensor.element_size]
        + [torch.numel, torch.is_floating_point, torch.is_complex]
    )


@functools.cache
def _scalings() -> frozenset[Any]:
    """Return functions that scale or convert each element."""
    names = "to mul multiply div divide true_divide __mul__ __rmul__ __truediv__"
    found = [
        getattr(of, n, None) for of in (torch, torch.Tensor) for n in names.split()
    ]
    return frozenset(found) - {None}


def gradient_shard(
    gradient: torch.Tensor, shards: FlatShards, replica: int
) -> torch.Tensor:
    """Return a replica's shard of a gradient's sum."""
    if isinstance(gradient, ShardedGradient):
        return gradient.shard(replica)
    return shard_of(gradient, shards, replica)


def sum_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum tensors of several devices, on the first one's."""
    total = tensors[0].detach().clone()
    for tensor in tensors[1:]:
        total += tensor.detach().to(total.device)
    return total


def get_or_create_components(variable: Any, layout: Layout) -> Components:
    """Return a variable's components, created when a replica first uses it."""
    # A variable of no strategy, such as the process's seed generator, may be used by
    # several: each then creates components from the first one.
    # Called for each variable in each run, so compare identity first.
    components = vars(variable).get(COMPONENTS)
    if components is not None:
        if components.layout is layout or components.layout == layout:
            return components
        if components.on_read or components.shards is not None:
            ownership.check_owner(context.get_strategy(), variable)
            return components
    if current_stateless_scope() is None:
        ownership.broadcast_pending_values()  # before it is copied
        components = vars(variable).get(COMPONENTS)
        if components is not None and components.shards is not None:
            return components
    components = vars(variable)[COMPONENTS] = Components(variable, layout)
    retype(variable)
    return components


class StagedWriteScope(ReplicaScope):
    """The variables as one replica reads and writes them."""

    # `run` identifies the run; it is the same object for all its replicas.

    replica: Any

    def __init__(self, replica: Any, layout: Layout, run: object):
        super().__init__(replica)
        self.device = layout.devices[replica.index]
        self._index = replica.index
        # True unless another replica of the device has the mirrored variables.
        self._owns = layout.owners[replica.index] == replica.index
        self._layout = layout
        self._run = run
        self._variables: dict[int, Any] = {}
        self._components: dict[int, Components] = {}
        # This replica's Parameters for variables whose tensors it does not own.
        self._copies: dict[int, torch.Tensor] = {}
        # Variables that the optimizer changed in place in a training step, and what it
        # staged.
        self.changed_in_place: dict[int, Any] = {}
        self.staged_by_optimizer: dict[int, torch.Tensor] = {}

    def _component(self, variable: Any) -> torch.Tensor:
        components = self._components.get(id(variable))
        if components is None:
            components = get_or_create_components(variable, self._layout)
            if components.run is not self._run:
                # Later the first component may be ahead because its replica is.
                components.refresh(variable)
                components.run = self._run
            self._components[id(variable)] = components
            self._variables[id(variable)] = variable
            if variable.aggregation == "sum":
                self.replica.step.sum_variables_read.add(id(variable))
        first = components.first
        is_shared = components.is_central or not (self._owns or components.on_read)
        if self._index == 0 and not is_shared:
            return first
        tensor = components.tensors[self._index]
        if is_shared:
            copy = self._copies.get(id(variable))
            if copy is None:
                # It collects this replica's gradient. On the same device it shares the
                # memory, since a replica writes when all have succeeded.
                copy = tensor.detach().to(self.device)
                copy = torch.nn.Parameter(copy, first.requires_grad)
                self._copies[id(variable)] = copy
            return copy
        if tensor.requires_grad != first.requires_grad:  # frozen or unfrozen
            tensor.requires_grad_(first.requires_grad)
        return tensor

    def get_current_value(self, variable: Any) -> torch.Tensor | None:
        key = id(variable)
        staged = self.state_mapping.get(key)
        if staged is not None:
            if self.replica.step.is_applying:
                self.staged_by_optimizer[key] = staged
            return staged
        if not self.replica.step.is_applying:
            components = self._components.get(key) if self._index == 0 else None
            if components is not None and not components.is_central:
                return components.first
            return None if stored_value(variable) is None else self._component(variable)
        if stored_value(variable) is None:
            return None
        if self.replica.step.row_weight is None or self._layout.home is not None:
            # Keras's torch optimizers work in place, on what they read here.
            return self._stage(variable, self._component(variable))
        # A training step writes in place and saves the copies; see `TorchGroup.run`.
        self.changed_in_place[key] = variable
        return self._component(variable)

    local_value = get_current_value

    def add_update(self, update: tuple[Any, torch.Tensor]) -> None:
        variable, value = update
        if stored_value(variable) is None:
            raise unbuilt_variable_error(variable)
        component = self._component(variable)
        components = self._components[id(variable)]
        if components.shards is not None:
            value = components.shard_to_write(self.replica, value)
        if id(variable) in self.changed_in_place:
            with torch.no_grad():
                component.copy_(value)
        else:
            self._stage(variable, value)

    def _stage(self, variable: Any, value: torch.Tensor) -> torch.Tensor:
        component = self._component(variable)
        staged = value.detach().to(component.device, component.dtype, copy=True)
        if component.requires_grad:
            staged.requires_grad_()
        self.state_mapping[id(variable)] = staged
        if self.replica.step.is_applying:
            self.staged_by_optimizer[id(variable)] = staged
        return staged

    def adopt_updates(self, owner: "StagedWriteScope") -> None:
        """Read what the optimizer has staged in the replica that owns the tensors."""
        for key, staged in owner.staged_by_optimizer.items():
            if not owner._components[key].on_read:
                self._component(owner._variables[key])
                self.state_mapping[key] = staged

    def commit(self) -> None:
        """Write the staged values to this replica's components."""
        with torch.no_grad():
            for key, staged in self.state_mapping.items():
                components = self._components[key]
                if components.is_central:
                    if self._index == 0:  # they are equal on all replicas
                        components.first.copy_(staged)
                elif self._owns or components.on_read:
                    self._component(self._variables[key]).copy_(staged)

    def record_versions(self) -> None:
        """Record the versions after the replicas' own writes, and check the others."""
        for key in [*self.state_mapping, *self.changed_in_place]:
            components = self._components[key]
            components.version = components.first._version
        for key, components in self._components.items():
            if components.first._version != components.version:
                components.check_mirrored(self._variables[key])


class ShardedWriteScope(StagedWriteScope):
    """The variables as one replica reads and writes them, if weights are sharded."""

    def get_current_value(self, variable: Any) -> torch.Tensor | None:
        # Keras calls it for regularizers.
        value = self.local_value(variable)
        components = vars(variable).get(COMPONENTS)
        if value is None or components is None:
            return value
        return components.seen_value(value)
