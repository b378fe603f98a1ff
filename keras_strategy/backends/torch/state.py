"""The components of a variable: one tensor on each replica's device.

The first is the Parameter that Keras made, so that a variable read outside of the
replicas, saved or handed to torch code is an ordinary one.

What a replica reads and writes while it runs.

Keras sends every read and assignment of a variable to the `StatelessScope` that a
thread is in. Ours reads this replica's component, keeps what is assigned, and writes
it when all replicas have succeeded.
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
from keras_strategy.keras_patches.variables_optimizers import stored
from keras_strategy.training import ownership
from keras_strategy.training.ownership import check_sync_on_read_owner
from keras_strategy.training.sharding import FlatShards
from keras_strategy.training.variable_sync import (
    is_sync_on_read,
    local_contribution,
    no_value_error,
    split_for_local_replicas,
)

ATTRIBUTE = "_ks_components"


@dataclass(frozen=True)
class Layout:
    """Where the replicas of a strategy are.

    Attributes:
        devices: torch's names of the local replicas' devices.
        workers: The processes that they belong to, None for this one alone.
        topology: The numbers of the replicas.
        home: torch's name of the device that keeps the variables; None where each
            replica's keeps a copy.
    """

    devices: tuple[str, ...]
    workers: TorchWorkers | None
    topology: ReplicaTopology
    home: str | None = None


class Components:
    """The tensors of one variable, and the version of the first.

    Args:
        variable: A `keras.Variable` that is initialized.
        layout: Where its strategy's replicas are.

    Attributes:
        shares: Which elements each replica keeps, None where each keeps all.
        is_central: Whether one device keeps it for all replicas.
    """

    shares: FlatShards | None = None
    is_central = False

    def __init__(self, variable: Any, layout: Layout):
        self.layout = layout
        self.on_read = is_sync_on_read(variable)
        # That a replica reads it, see `StepState.read`.
        self.is_noted = variable.aggregation == "sum" and not self.on_read
        self.first = stored(variable)
        self.tensors = [self.first]
        # One for all replicas, of which each works on a copy while it runs.
        self.is_central = layout.home is not None and not self.on_read
        if self.is_central:
            self.tensors *= len(layout.devices)
            self.version, self._run = 0, None
            return
        for device in layout.devices[1:]:
            with torch.no_grad():
                tensor = self.first.detach().to(device, copy=True)
            self.tensors.append(
                torch.nn.Parameter(tensor, requires_grad=self.first.requires_grad)
            )
        self.version = self.first._version
        self._run: object = None
        if self.on_read:
            # The replicas' parts make up the value that there was.
            self.assign(variable, self.first.detach().clone())

    def refresh_once(self, variable: Any, run: object) -> None:
        """Refreshes the components once in a run, by the replica that comes first.

        Later the first component may be ahead of the others because its replica is.

        Args:
            variable: The variable.
            run: What stands for the run.
        """
        if self._run is not run:
            self.refresh(variable)
            self._run = run

    def refresh(self, variable: Any) -> None:
        """Copies the first component to the others if somebody wrote to it.

        Code that knows nothing of replicas (an optimizer of torch's, an in-place
        operation on `variable.value`) writes to the first alone.
        """
        if self.first._version == self.version or self.on_read or self.is_central:
            return
        with torch.no_grad():
            for tensor in self.tensors[1:]:
                tensor.copy_(self.first)
        self.version = self.first._version

    def check_mirrored(self, variable: Any) -> None:
        """Raises unless what replicas wrote by themselves is the same on all of them.

        Args:
            variable: The variable.

        Raises:
            MirrorError: If it is not.
        """
        if self.on_read or self.is_central:
            return
        first, *others = [tensor.detach() for tensor in self.tensors]
        if not all(torch.equal(first, other.to(first.device)) for other in others):
            raise MirrorError(
                f"The tensor of the variable '{variable.path}' was changed in a step "
                "by something that knows of no replicas, such as an optimizer of "
                "torch's, and the replicas hold different values now. Have an "
                "optimizer of Keras's apply the gradients, `optimizer.apply(gradients, "
                "variables)`, which adds up those of all replicas; or assign to the "
                "variable. The model holds what one replica made of its rows: load its "
                "weights again."
            )
        self.version = self.first._version

    def assign(self, variable: Any, value: torch.Tensor) -> None:
        """Writes a value for all replicas, outside of them."""
        value = value.detach()
        self.assign_each(
            split_for_local_replicas(variable, value, self.layout.topology)
        )

    def replica_copy(self, index: int) -> torch.Tensor:
        """A replica's own of what one device keeps for all, while it runs.

        It is a Parameter of its own, which gathers this replica's gradient. On the
        device that keeps the variable it shares the memory, since a replica writes when
        all have succeeded; to any other it is copied.

        Args:
            index: The replica's number on this worker.
        """
        with torch.no_grad():
            value = self.first.detach().to(self.layout.devices[index])
        return torch.nn.Parameter(value, requires_grad=self.first.requires_grad)

    def assign_each(self, values: Sequence[torch.Tensor]) -> None:
        """Writes a value for each replica, outside of them."""
        with torch.no_grad():
            for tensor, value in zip(self.tensors, values, strict=True):
                tensor.copy_(value)
        self.version = self.first._version

    def own_part(self, value: torch.Tensor, index: int) -> torch.Tensor:
        """What a replica of this worker keeps of what is assigned to the variable.

        Args:
            value: The value, of the variable's shape.
            index: The replica's number on this worker.
        """
        return value

    def together(self, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The variable's value for each replica of this worker.

        All replicas' shares make it up; with several workers, all of them have to ask.

        Args:
            parts: What each of them holds.
        """
        return parts

    def aggregated(self, variable: Any) -> torch.Tensor:
        """What an on_read variable is outside of the replicas.

        With several workers, all of them have to ask.

        Raises:
            ValueError: If its aggregation is "none".
        """
        if variable.aggregation == "none":
            raise no_value_error(variable)
        part = self.part_of_this_worker(variable)
        workers = self.layout.workers
        if workers is None:
            return part
        return workers.sum(f"the value of '{variable.path}'", part)

    def part_of_this_worker(self, variable: Any) -> torch.Tensor:
        """What this worker adds to an on_read variable's value."""
        with torch.no_grad():
            # What is read stays as it is when a replica goes on to write.
            own = self.first.detach().clone()
            tensors = [own, *self.tensors[1:]]
            return local_contribution(
                variable, tensors, self.layout.topology, sum_tensors
            )


def sum_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of tensors of several devices, on the first one's."""
    total = tensors[0].detach().clone()
    for tensor in tensors[1:]:
        total += tensor.detach().to(total.device)
    return total


def find_components(variable: Any) -> Components | None:
    """The components of a variable that replicas have used, or None."""
    components = variable.__dict__.get(ATTRIBUTE)
    # Keras replaces the tensor of a variable when it initializes it again.
    if components is None or components.first is not stored(variable):
        return None
    return components


def together(variable: Any, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The value of a variable for each replica of this worker, of what each holds."""
    components = find_components(variable)
    return values if components is None else components.together(values)


def get_or_create_components(variable: Any, layout: Layout) -> Components:
    """The components of a variable, made when a replica first uses it.

    A variable that belongs to no strategy, as the process's own seed generator, may be
    used by several: then each makes them of what the first component is.
    """
    components = find_components(variable)
    # Asked for each variable in every run: no function of its own.
    if components is not None:
        if components.layout is layout or components.layout == layout:
            return components
        if components.on_read or components.shares is not None:
            check_sync_on_read_owner(context.get_strategy(), variable)
            return components
    if current_stateless_scope() is None:
        ownership.broadcast_pending_values()  # before it is copied
    components = vars(variable)[ATTRIBUTE] = Components(variable, layout)
    return components


class StagedWriteScope(ReplicaScope):
    """The variables as one replica sees them.

    Args:
        replica: The replica.
        index: Its number on this worker.
        layout: Where all replicas are.
        run: Stands for the run, the same object for all its replicas.
    """

    def __init__(
        self,
        replica: Replica,
        index: int,
        layout: Layout,
        run: object,
    ):
        super().__init__(replica)
        self.device = layout.devices[index]
        self._index = index
        self._layout = layout
        self._run = run
        self._variables: dict[int, Any] = {}
        self._components: dict[int, Components] = {}
        # This replica's own of what one device keeps for all of them.
        self._copies: dict[int, torch.Tensor] = {}
        # What the optimizer read in a training step, and so changed in place.
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
            own = self._copies.get(id(variable))
            if own is None:
                own = self._copies[id(variable)] = components.replica_copy(self._index)
            return own
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
            known = self._components.get(key) if self._index == 0 else None
            if known is not None and not known.is_central:
                return known.first
            return None if stored(variable) is None else self._component(variable)
        if stored(variable) is None:
            return None
        if self.replica.step.row_weight is None or self._layout.home is not None:
            # Keras's torch optimizers work in place, on what they read here.
            return self._stage(variable, self._component(variable))
        # A training step saves itself the copies; see `TorchGroup.run`.
        self.changed_in_place[key] = variable
        return self._component(variable)

    def add_update(self, update: tuple[Any, torch.Tensor]) -> None:
        variable, value = update
        if stored(variable) is None:
            raise unbuilt_variable_error(variable)
        component = self._component(variable)
        known = self._components[id(variable)]
        if known.shares is not None:
            value = known.own_part(value, self._index)
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
        """Writes what this replica staged to its components."""
        with torch.no_grad():
            for key, staged in self.state_mapping.items():
                components = self._components[key]
                if not components.is_central:
                    self._component(self._variables[key]).copy_(staged)
                elif self._index == 0:  # they are the same on all replicas
                    components.first.copy_(staged)

    def record_versions(self) -> None:
        """Remembers that what was written now was written by the replicas."""
        for key in [*self.state_mapping, *self.changed_in_place]:
            components = self._components[key]
            components.version = components.first._version
        for key, components in self._components.items():
            if components.first._version != components.version:
                components.check_mirrored(self._variables[key])
