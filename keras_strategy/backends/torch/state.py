"""The components of a variable: one tensor on each replica's device.

The first is the Parameter that Keras created, so a variable that is read in
cross-replica context, saved or passed to torch code is an ordinary one.

Keras sends every read and assignment in a replica to the thread's `StatelessScope`.
Ours reads the replica's component, stages what is assigned, and commits it when all
replicas have succeeded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from keras_strategy.backends.threads.patches import current_stateless_scope
from keras_strategy.backends.threads.scopes import ReplicaScope, unbuilt_variable_error
from keras_strategy.backends.torch.collectives import TorchWorkers
from keras_strategy.core import context
from keras_strategy.core.protocols import Replica
from keras_strategy.devices import ReplicaTopology
from keras_strategy.errors import MirrorError
from keras_strategy.keras_patches.variables_optimizers import stored_value
from keras_strategy.training import ownership
from keras_strategy.training.ownership import check_sync_on_read_owner
from keras_strategy.training.sharding import FlatShards
from keras_strategy.training.variable_sync import (
    is_sync_on_read,
    local_contribution,
    no_value_error,
    split_for_local_replicas,
)

COMPONENTS = "_ks_components"


@dataclass(frozen=True)
class Layout:
    """Placement of a strategy's replicas.

    Attributes:
        devices: torch's names of the local replicas' devices.
        workers: The processes of the cluster; None for one process.
        topology: The replicas' ids.
        home: torch's name of the device that stores the variables; None if each
            replica's device has a copy.
    """

    devices: tuple[str, ...]
    workers: TorchWorkers | None
    topology: ReplicaTopology
    home: str | None = None


class Components:
    """The tensors of one variable, and the version of the first.

    Attributes:
        shards: The elements that each replica stores; None if each stores all.
        is_central: True if one device stores the variable for all replicas.
        is_tracked: True if replicas record their reads, see `StepState`.
    """

    shards: FlatShards | None = None
    is_central = False

    def __init__(self, variable: Any, layout: Layout):
        self.layout = layout
        self.on_read = is_sync_on_read(variable)
        self.is_tracked = variable.aggregation == "sum" and not self.on_read
        self.first = stored_value(variable)
        self.tensors = [self.first]
        self._run: object = None
        # One for all replicas. Each works on a copy while it runs.
        self.is_central = layout.home is not None and not self.on_read
        if self.is_central:
            self.tensors *= len(layout.devices)
            self.version = 0
            return
        for device in layout.devices[1:]:
            with torch.no_grad():
                tensor = self.first.detach().to(device, copy=True)
            self.tensors.append(
                torch.nn.Parameter(tensor, requires_grad=self.first.requires_grad)
            )
        self.version = self.first._version
        if self.on_read:
            # The replicas' values must aggregate to the initial one.
            self.assign(variable, self.first.detach().clone())

    def refresh_once(self, variable: Any, run: object) -> None:
        """Refresh the components at their first use in a run.

        Later the first component may be ahead because its replica is.
        """
        if self._run is not run:
            self.refresh(variable)
            self._run = run

    def refresh(self, variable: Any) -> None:
        """Copy the first component to the others if other code wrote to it.

        A torch optimizer, or an in-place operation on `variable.value`, knows no
        replicas and writes to the first component only.
        """
        if self.first._version == self.version or self.on_read or self.is_central:
            return
        with torch.no_grad():
            for tensor in self.tensors[1:]:
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
        value = value.detach()
        self.assign_each(
            split_for_local_replicas(variable, value, self.layout.topology)
        )

    def assign_each(self, values: Sequence[torch.Tensor]) -> None:
        """Assign one value per local replica, in cross-replica context."""
        with torch.no_grad():
            for tensor, value in zip(self.tensors, values, strict=True):
                tensor.copy_(value)
        self.version = self.first._version

    def replica_copy(self, index: int) -> torch.Tensor:
        """Return a replica's Parameter for a central variable while it runs.

        It collects this replica's gradient. On the home device it shares the memory,
        since a replica writes when all have succeeded; to others it is copied.
        """
        with torch.no_grad():
            value = self.first.detach().to(self.layout.devices[index])
        return torch.nn.Parameter(value, requires_grad=self.first.requires_grad)

    def local_shard(self, value: torch.Tensor, index: int) -> torch.Tensor:
        """Return what a local replica stores of an assigned value."""
        return value

    def full_values(self, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the variable's value for each local replica.

        If it is sharded, all workers have to call this.

        Args:
            parts: What each local replica stores.
        """
        return parts

    def aggregated_value(self, variable: Any) -> torch.Tensor:
        """Return a sync-on-read variable's value; all workers have to call this."""
        if variable.aggregation == "none":
            raise no_value_error(variable)
        contribution = self.worker_contribution(variable)
        workers = self.layout.workers
        if workers is None:
            return contribution
        return workers.sum(f"the value of '{variable.path}'", contribution)

    def worker_contribution(self, variable: Any) -> torch.Tensor:
        """Return what this worker adds to a sync-on-read variable's value."""
        with torch.no_grad():
            # A copy, since a replica may write to the component later.
            tensors = [self.first.detach().clone(), *self.tensors[1:]]
            return local_contribution(
                variable, tensors, self.layout.topology, sum_tensors
            )


def sum_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum tensors of several devices, on the first one's."""
    total = tensors[0].detach().clone()
    for tensor in tensors[1:]:
        total += tensor.detach().to(total.device)
    return total


def find_components(variable: Any) -> Components | None:
    """Return a variable's components if replicas have used it."""
    components = variable.__dict__.get(COMPONENTS)
    # Keras replaces the tensor of a variable when it initializes it again.
    if components is None or components.first is not stored_value(variable):
        return None
    return components


def full_values(variable: Any, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return a variable's value for each local replica, given what each stores."""
    components = find_components(variable)
    return parts if components is None else components.full_values(parts)


def get_or_create_components(variable: Any, layout: Layout) -> Components:
    """Return a variable's components, created when a replica first uses it.

    A variable of no strategy, such as the process's seed generator, may be used by
    several: each then creates components from the first one.
    """
    components = find_components(variable)
    # Called for each variable in each run, so compare identity first.
    if components is not None:
        if components.layout is layout or components.layout == layout:
            return components
        if components.on_read or components.shards is not None:
            check_sync_on_read_owner(context.get_strategy(), variable)
            return components
    if current_stateless_scope() is None:
        ownership.broadcast_pending_values()  # before it is copied
    components = vars(variable)[COMPONENTS] = Components(variable, layout)
    return components


class StagedWriteScope(ReplicaScope):
    """The variables as one replica reads and writes them.

    Args:
        index: Its index on this worker.
        layout: The placement of all replicas.
        run: Identifies the run; the same object for all its replicas.
    """

    def __init__(self, replica: Replica, index: int, layout: Layout, run: object):
        super().__init__(replica)
        self.device = layout.devices[index]
        self._index = index
        self._layout = layout
        self._run = run
        self._variables: dict[int, Any] = {}
        self._components: dict[int, Components] = {}
        # This replica's Parameters for central variables.
        self._copies: dict[int, torch.Tensor] = {}
        # Variables that the optimizer changed in place in a training step.
        self.changed_in_place: dict[int, Any] = {}

    def _component(self, variable: Any) -> torch.Tensor:
        components = self._components.get(id(variable))
        if components is None:
            components = get_or_create_components(variable, self._layout)
            components.refresh_once(variable, self._run)
            self._components[id(variable)] = components
            self._variables[id(variable)] = variable
            if variable.aggregation == "sum":
                self.replica.step.sum_variables_read.add(id(variable))
        if components.is_central:
            copy = self._copies.get(id(variable))
            if copy is None:
                copy = self._copies[id(variable)] = components.replica_copy(self._index)
            return copy
        first = components.first
        if self._index == 0:
            return first
        tensor = components.tensors[self._index]
        if tensor.requires_grad != first.requires_grad:  # frozen or unfrozen
            tensor.requires_grad_(first.requires_grad)
        return tensor

    def get_current_value(self, variable: Any) -> torch.Tensor | None:
        key = id(variable)
        staged = self.state_mapping.get(key)
        if staged is not None:
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

    def add_update(self, update: tuple[Any, torch.Tensor]) -> None:
        variable, value = update
        if stored_value(variable) is None:
            raise unbuilt_variable_error(variable)
        component = self._component(variable)
        components = self._components[id(variable)]
        if components.shards is not None:
            value = components.local_shard(value, self._index)
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
        return staged

    def commit(self) -> None:
        """Write the staged values to this replica's components."""
        with torch.no_grad():
            for key, staged in self.state_mapping.items():
                components = self._components[key]
                if not components.is_central:
                    self._component(self._variables[key]).copy_(staged)
                elif self._index == 0:  # they are equal on all replicas
                    components.first.copy_(staged)

    def record_versions(self) -> None:
        """Record the versions after the replicas' own writes, and check the others."""
        for key in [*self.state_mapping, *self.changed_in_place]:
            components = self._components[key]
            components.version = components.first._version
        for key, components in self._components.items():
            if components.first._version != components.version:
                components.check_mirrored(self._variables[key])
