"""JAX backend: devices, gradients and replica groups."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import keras
from keras import tree

from keras_strategy.backends.jax import hooks_state as keras_state
from keras_strategy.core.components import unwrap_variables


class ChildScope(keras.StatelessScope):
    """StatelessScope that falls back to the enclosing scope.

    Keras's scopes do not nest: a variable whose tracer an outer scope holds would be
    read as a constant.
    """

    def __init__(self, mapping: Iterable[tuple[Any, Any]], parent: Any):
        super().__init__(collect_losses=True, initialize_variables=parent is None)
        self.parent = parent
        self.written: dict[int, Any] = {}
        self.state_mapping.update((id(v), value) for v, value in mapping)

    def get_current_value(self, variable: Any) -> Any:
        value = super().get_current_value(variable)
        if value is None and self.parent is not None:
            return self.parent.get_current_value(variable)
        return value

    def add_update(self, update: tuple[Any, Any]) -> None:
        self.written[id(update[0])] = update[0]
        super().add_update(update)


def value_and_grad(
    fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool
) -> Callable[..., Any]:
    """Implement `keras_strategy.value_and_grad`."""

    def value_and_gradients(*args: Any, **kwargs: Any) -> Any:
        aux: Any = None
        written: list[Any] = []

        def functional(values):
            nonlocal aux, written
            # Variables that fn creates are initialized outside of the trace.
            with ChildScope(zip(variables, values, strict=True), scope) as inner:
                inner.initialize_variables = False
                result = fn(*args, **kwargs)
                value, aux = result if has_aux else (result, None)
                value = keras.ops.convert_to_tensor(value)
                aux = unwrap_variables(aux)
            written = list(inner.written.values())
            # Tensors must leave the trace as outputs.
            tensors = [x for x in tree.flatten(aux) if keras.ops.is_tensor(x)]
            return value, (tensors, [inner.state_mapping[id(v)] for v in written])

        scope = keras_state.stateless_scope()
        try:
            (value, (tensors, states)), gradients = jax.value_and_grad(
                functional, has_aux=True
            )([v.value for v in variables])
        finally:
            if scope is None:
                keras_state.initialize_pending()
        # Assignments inside fn have been aggregated already.
        for variable, state in zip(written, states, strict=True):
            keras_state.write(variable, state)
        if not has_aux:
            return value, gradients
        leaves = iter(tensors)
        aux = tree.map_structure(
            lambda x: next(leaves) if keras.ops.is_tensor(x) else x, aux
        )
        return (value, aux), gradients

    return value_and_gradients
