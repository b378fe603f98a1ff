"""Access to JAX's own state and to a model's steps, for `keras_strategy.audit`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.core import Tracer
from keras import tree

from keras_strategy.backends.jax import connection
from keras_strategy.core.context import device_step_scope
from keras_strategy.core.protocols import AuditAdapter, Strategy


class Adapter(AuditAdapter):
    # `fit` is one program, from which no gradient can be read.
    records_steps = False

    def host_copy(self, x: Any) -> np.ndarray | None:
        if isinstance(x, Tracer) or not keras.ops.is_tensor(x):
            return None
        return np.array(x)

    def run_on_device(
        self, strategy: Strategy, fn: Callable[[], Any], variables: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        device = connection.device_named(strategy.extended.worker_devices[0])
        mapping = [
            (variable, jax.device_put(np.array(variable.value), device))
            for variable in variables
            if (variable.synchronization, variable.aggregation) != ("on_read", "none")
        ]
        with (
            device_step_scope(strategy),
            keras.device(device),
            keras.StatelessScope(state_mapping=mapping) as scope,
        ):
            is_tensor = keras.ops.is_tensor
            result = tree.map_structure(
                lambda x: np.array(x) if is_tensor(x) else x, fn()
            )
        after = (scope.get_current_value(variable) for variable in variables)
        return result, [None if value is None else np.array(value) for value in after]

    def step_functions(
        self, model: keras.Model, kind: str, strategy: Strategy
    ) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        def step_on_replicas(batch):
            if kind == "predict":
                return model.predict_on_batch(batch[0])
            call = model.train_on_batch if kind == "train" else model.test_on_batch
            return call(*batch, return_dict=True)

        def step_on_device(batch):
            groups = [model.trainable_variables, model.non_trainable_variables]
            if kind == "train":
                groups.append(model.optimizer.variables)
            if kind != "predict":
                groups.append(model.metrics_variables)
            state = tuple([v.value for v in variables] for variables in groups)
            data = tree.map_structure(keras.ops.convert_to_tensor, batch)
            outputs, new_state = getattr(model, f"{kind}_step")(state, data)
            if kind == "predict":
                return outputs
            for variables, values in zip(groups, new_state, strict=False):
                for variable, value in zip(variables, values, strict=True):
                    variable.assign(value)
            return outputs

        return step_on_replicas, step_on_device
