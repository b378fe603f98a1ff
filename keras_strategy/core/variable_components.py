"""Components of a variable, for changes outside the replicas."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import keras
from keras import ops, tree

from keras_strategy.core.registry import get_engine
from keras_strategy.values import Mirrored, map_leaves, regroup, select_replica


class VariableComponent(keras.Variable):
    """One replica's component of a variable, as `extended.update` passes it.

    It has the variable's name, path, shape and dtype, can be used in place of a
    tensor, and supports `assign`, `assign_add` and `assign_sub`. Assigned values are
    written when the function has succeeded for all components.

    Args:
        container: The variable.
        value: This component's tensor.
        device: The canonical name of its device.
    """

    def __init__(self, container: Any, value: Any, device: str):
        # Copies the name, shape, dtype and so on without creating a variable.
        self.__dict__.update(vars(container))
        self.container = container
        self.device = device
        self.assigned = False
        self._component = value

    @property
    def value(self) -> Any:
        """The tensor that was assigned last."""
        return self._component

    def assign(self, value: Any) -> Any:
        """Replace the value.

        Args:
            value: A tensor of the variable's shape, or what converts to one.

        Returns:
            The new value.

        Raises:
            ValueError: If the shape differs.
        """
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
        """Add to the value, and return the new one."""
        return self.assign(ops.add(self.value, self._increment(value)))

    def assign_sub(self, value: Any) -> Any:
        """Subtract from the value, and return the new one."""
        return self.assign(ops.subtract(self.value, self._increment(value)))

    def _increment(self, value: Any) -> Any:
        return ops.convert_to_tensor(value, dtype=self.dtype)

    def __repr__(self) -> str:
        return f"<VariableComponent of '{self.path}' on {self.device}: {self.value!r}>"


class ComponentOwners:
    """Map from components to their variables, without keeping either alive."""

    def __init__(self):
        # By id, since tensors have no `==`; the reference detects reused ids.
        self._owners: dict[int, tuple[weakref.ref, weakref.ref]] = {}

    def remember(self, components: Iterable[Any], variable: Any) -> None:
        """Record that the components belong to the variable."""
        owners = self._owners
        for component in components:
            key = id(component)

            def forget(reference, key=key):
                if key in owners and owners[key][0] is reference:
                    del owners[key]

            reference = weakref.ref(component, forget)
            owners[key] = (reference, weakref.ref(variable))

    def get(self, component: Any, otherwise: Any) -> Any:
        """Return the variable that a component belongs to, or `otherwise`."""
        reference, variable = self._owners.get(id(component), (None, None))
        if reference is None or variable is None or reference() is not component:
            return otherwise
        container = variable()
        return otherwise if container is None else container


def unwrap_variables(result: Any) -> Any:
    """Return a structure with values in place of variables."""
    return map_leaves(
        lambda leaf: leaf.value if isinstance(leaf, keras.Variable) else leaf, result
    )


def update_components(
    group: Any, variable: Any, fn: Callable, args: tuple, kwargs: dict
) -> Any:
    """Call `fn` for each component, then write what was assigned.

    Args:
        group: A group of several replicas.
        variable: One of its variables.
        fn: Called with a `VariableComponent` and the arguments, on its device.
        args: Positional arguments. Each component gets its component of distributed
            values, and of variables, which all belong to the group.
        kwargs: Keyword arguments, likewise.

    Returns:
        The outputs, joined, with `Mirrored` in place of tensors.
    """
    backend, replicas = get_engine(), len(group.devices)
    variables = [
        x for x in tree.flatten((args, kwargs)) if isinstance(x, keras.Variable)
    ]
    values = {id(x): (x, group.components(x)) for x in (variable, *variables)}
    components: list[dict[int, VariableComponent]] = []
    results = []
    for replica, device in enumerate(group.devices):

        def component(of, replica=replica, device=device):
            variable, parts = of
            value = ops.convert_to_tensor(parts[replica])
            return VariableComponent(variable, value, device)

        def place(leaf, device=device):
            if isinstance(leaf, keras.Variable):
                return components[-1][id(leaf)]
            return backend.copy_to(leaf, device) if backend.is_tensor(leaf) else leaf

        local = select_replica((args, kwargs), replica, replicas, "update")
        with backend.device_scope(device):
            components.append({key: component(of) for key, of in values.items()})
            local_args, local_kwargs = tree.map_structure(place, local)
            results.append(
                unwrap_variables(
                    fn(components[-1][id(variable)], *local_args, **local_kwargs)
                )
            )
    for key, (target, _) in values.items():
        assigned_to = [by_variable[key] for by_variable in components]
        if any(component.assigned for component in assigned_to):
            group.assign_components(target, [c.value for c in assigned_to])
    return regroup(results, backend.is_tensor, Mirrored, always_distributed=True)
