"""Changing a variable outside of the replicas, one component at a time."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import keras
from keras import ops, tree

from keras_strategy.core.registry import get_engine
from keras_strategy.values.distributed import (
    Mirrored,
    map_leaves,
    regroup,
    select_replica,
)


class VariableComponent(keras.Variable):
    """One replica's part of a variable, as `extended.update` hands it out.

    It has the variable's name, path, shape and dtype, can be used in place of a
    tensor, and takes `assign`, `assign_add` and `assign_sub`. What is assigned is
    written when the function has succeeded for all components.

    Args:
        container: The variable.
        value: This component's tensor.
        device: The canonical name of its device.
    """

    def __init__(self, container: Any, value: Any, device: str):
        # Its name, shape, dtype and the like, without making a variable.
        self.__dict__.update(vars(container))
        self.container = container
        self.device = device
        self.assigned = False
        self._component = value

    @property
    def value(self) -> Any:
        """The tensor: what was assigned last."""
        return self._component

    def assign(self, value: Any) -> Any:
        """Replaces the value.

        Args:
            value: A tensor, or what can become one, of the variable's shape.

        Returns:
            The new value.

        Raises:
            ValueError: If the shape is another.
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
        """Adds to the value, and returns the new one."""
        return self.assign(ops.add(self.value, self._increment(value)))

    def assign_sub(self, value: Any) -> Any:
        """Subtracts from the value, and returns the new one."""
        return self.assign(ops.subtract(self.value, self._increment(value)))

    def _increment(self, value: Any) -> Any:
        return ops.convert_to_tensor(value, dtype=self.dtype)

    def __repr__(self) -> str:
        return f"<VariableComponent of '{self.path}' on {self.device}: {self.value!r}>"


class Containers:
    """Which variable a component belongs to, as long as both are there."""

    def __init__(self):
        # By id, since tensors cannot be compared; the reference tells whether an id
        # still is that component's.
        self._known: dict[int, tuple[weakref.ref, weakref.ref]] = {}

    def remember(self, components: Iterable[Any], variable: Any) -> None:
        """Notes that the components are the variable's."""
        known = self._known
        for component in components:
            key = id(component)

            def forget(reference, key=key):
                if key in known and known[key][0] is reference:
                    del known[key]

            reference = weakref.ref(component, forget)
            known[key] = (reference, weakref.ref(variable))

    def get(self, component: Any, otherwise: Any) -> Any:
        """The variable that a component belongs to, or `otherwise`."""
        reference, variable = self._known.get(id(component), (None, None))
        if reference is None or variable is None or reference() is not component:
            return otherwise
        container = variable()
        return otherwise if container is None else container


def bare(result: Any) -> Any:
    """What a function of components returned, with values for variables."""
    return map_leaves(
        lambda leaf: leaf.value if isinstance(leaf, keras.Variable) else leaf, result
    )


def update_components(
    group: Any, variable: Any, fn: Callable, args: tuple, kwargs: dict
) -> Any:
    """Calls `fn` for each component, then writes what was assigned.

    Args:
        group: A group of several replicas.
        variable: One of its variables.
        fn: Called with a `VariableComponent` and the arguments, on its device.
        args: Positional arguments; each component gets its part of distributed ones
            and the components on its device of variables, which are all of the group.
        kwargs: Keyword arguments, likewise.

    Returns:
        What `fn` returned, joined, with `Mirrored` in the place of tensors.
    """
    backend, replicas = get_engine(), len(group.devices)
    given = [x for x in tree.flatten((args, kwargs)) if isinstance(x, keras.Variable)]
    values = {id(x): (x, group.components(x)) for x in (variable, *given)}
    made: list[dict[int, VariableComponent]] = []
    results = []
    for replica, device in enumerate(group.devices):

        def component(of, replica=replica, device=device):
            variable, parts = of
            value = ops.convert_to_tensor(parts[replica])
            return VariableComponent(variable, value, device)

        def place(leaf, device=device):
            if isinstance(leaf, keras.Variable):
                return made[-1][id(leaf)]
            return backend.copy_to(leaf, device) if backend.is_tensor(leaf) else leaf

        own = select_replica((args, kwargs), replica, replicas, "update")
        with backend.device_scope(device):
            made.append({key: component(of) for key, of in values.items()})
            own_args, own_kwargs = tree.map_structure(place, own)
            results.append(bare(fn(made[-1][id(variable)], *own_args, **own_kwargs)))
    for key, (assigned, _) in values.items():
        components = [of_replica[key] for of_replica in made]
        if any(component.assigned for component in components):
            group.assign_components(assigned, [c.value for c in components])
    return regroup(results, backend.is_tensor, Mirrored, one_of_many=True)
