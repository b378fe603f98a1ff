"""Components of a variable, for changes outside the replicas, and values in scopes."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
from keras import ops, tree

from keras_strategy.core.protocols import ReplicaGroup
from keras_strategy.core.registry import get_engine
from keras_strategy.values import (
    Mirrored,
    PerReplica,
    map_leaves,
    regroup,
    select_replica,
)


class VariableComponent(keras.Variable):
    """One replica's component of a variable, as `extended.update` passes it."""

    # It has the variable's name, path, shape and dtype. Assigned values are written
    # when the function has succeeded for all components.

    def __init__(self, container: Any, value: Any, device: str):
        # Copies the name, shape, dtype and so on without creating a variable.
        self.__dict__.update(vars(container))
        self.container = container
        self.device = device
        self.assigned = False
        self._component = value

    @property
    def value(self) -> Any:
        return self._component

    def assign(self, value: Any) -> Any:
        value = ops.convert_to_tensor(value, dtype=self.dtype)
        if tuple(value.shape) != tuple(self.shape):
            raise ValueError(
                f"A value for the variable '{self.path}' must have its shape, "
                f"{tuple(self.shape)}. Received a value of shape {tuple(value.shape)}."
            )
        self._component = value
        self.assigned = True
        return value

    def assign_add(self, value: Any) -> Any:
        value = ops.convert_to_tensor(value, dtype=self.dtype)
        return self.assign(ops.add(self.value, value))

    def assign_sub(self, value: Any) -> Any:
        value = ops.convert_to_tensor(value, dtype=self.dtype)
        return self.assign(ops.subtract(self.value, value))

    def __repr__(self) -> str:
        return f"<VariableComponent of '{self.path}' on {self.device}: {self.value!r}>"


class ChildScope(keras.StatelessScope):
    """StatelessScope that falls back to the enclosing scope, which Keras's do not."""

    def __init__(self, values: Iterable[tuple[Any, Any]], parent: Any, **options: Any):
        super().__init__(initialize_variables=False, **options)
        self.parent = parent
        self.state_mapping.update((id(v), value) for v, value in values)

    def get_current_value(self, variable: Any) -> Any:
        value = super().get_current_value(variable)
        if value is None and self.parent is not None:
            return self.parent.get_current_value(variable)
        return value


def unwrap_variables(result: Any) -> Any:
    """Return a structure with values in place of variables."""
    return map_leaves(
        lambda leaf: leaf.value if isinstance(leaf, keras.Variable) else leaf, result
    )


class ComponentGroup(ReplicaGroup):
    """A replica group that has the components of variables outside of programs."""

    def sync_initial_values(self, variables: Sequence[Any]) -> int:
        if self.workers is None:
            return len(variables)
        chiefs = self.workers.broadcast_if_different(
            "the first values of variables", list(map(self.initial_value, variables))
        )
        for variable, value in zip(variables, chiefs, strict=False):
            if value is not None:
                self.set_initial_value(variable, value)
        return len(chiefs)

    def shard_weights(self, variables: Sequence[Any]) -> None:
        """Shard variables that have the chief's values, if this strategy does."""

    def prepare_slot(self, weight: Any, sharding: Any) -> None:
        """Prepare a weight for a slot that an optimizer shards."""

    def initial_value(self, variable: Any) -> Any:
        """Return this worker's value, for a comparison with the chief's."""

    def set_initial_value(self, variable: Any, value: Any) -> None:
        """Set a new variable to the chief's value."""

    def per_replica_value(self, variable: Any) -> PerReplica:
        return PerReplica(self.components(variable))

    def mirror(self, value: Any) -> Mirrored:
        return Mirrored([get_engine().copy_to(value, name) for name in self.devices])

    def update(
        self, variable: Any, fn: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Any:
        engine, devices = get_engine(), self.devices
        arguments = tree.flatten((args, kwargs))
        targets = [variable, *(x for x in arguments if isinstance(x, keras.Variable))]
        values = {id(target): (target, self.components(target)) for target in targets}
        # Of each variable, by replica.
        components: dict[int, list[VariableComponent]] = {key: [] for key in values}
        results = []
        for replica, device in enumerate(devices):

            def place(leaf, device=device):
                if isinstance(leaf, keras.Variable):
                    return components[id(leaf)][-1]
                return engine.copy_to(leaf, device) if engine.is_tensor(leaf) else leaf

            local = select_replica((args, kwargs), replica, len(devices), "update")
            with engine.device_scope(device):
                for key, (target, parts) in values.items():
                    value = ops.convert_to_tensor(parts[replica])
                    components[key].append(VariableComponent(target, value, device))
                local_args, local_kwargs = tree.map_structure(place, local)
                result = fn(components[id(variable)][-1], *local_args, **local_kwargs)
                results.append(unwrap_variables(result))
        for key, (target, _) in values.items():
            if any(component.assigned for component in components[key]):
                self.assign_components(target, [c.value for c in components[key]])
        return regroup(results, engine.is_tensor, Mirrored, always_distributed=True)
