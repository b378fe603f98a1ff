"""What a replica reads and writes while it runs.

Keras sends every read and assignment of a variable to the `StatelessScope` that a
thread is in. Ours reads this replica's component, keeps what is assigned, and writes
it when all replicas have succeeded.
"""

from typing import Any

import torch

from keras_strategy.backends.threads.scopes import ReplicaScope, unbuilt_variable_error
from keras_strategy.backends.torch.components import Components, Layout, get_or_create_components
from keras_strategy.core.protocol import Replica
from keras_strategy.hooks.variables import stored


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
