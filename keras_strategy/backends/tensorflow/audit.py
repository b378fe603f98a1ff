"""Access to TensorFlow's state and to a model's steps, for `keras_strategy.audit`."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_strategy.backends.tensorflow.tensors import rows_of_tensor, slice_rows
from keras_strategy.backends.tensorflow.training import TrainingStrategy
from keras_strategy.core.protocols import AuditAdapter
from keras_strategy.keras_patches.internals import stored_value


class Adapter(AuditAdapter):
    def first_rows(self, x: Any, rows: int) -> Any:
        if not tf.is_tensor(x):
            return x[:rows]
        return slice_rows(x, (0, tf.minimum(rows, rows_of_tensor(x))))

    def host_copy(self, x: Any) -> np.ndarray | None:
        if isinstance(x, tf.RaggedTensor):
            x = x.to_tensor()
        elif isinstance(x, tf.SparseTensor):
            x = tf.sparse.to_dense(x)
        elif isinstance(x, tf.IndexedSlices | tf.Variable):
            x = tf.convert_to_tensor(x)
        is_eager = isinstance(x, tf.Tensor) and hasattr(x, "numpy")
        return np.array(x.numpy()) if is_eager else None

    def tensor_restorer(self, x: Any) -> Callable[[], None] | None:
        if not isinstance(x, tf.Variable):
            return None
        value = tf.identity(x)
        return lambda: x.assign(value)

    def module_tensors(self, x: Any) -> Sequence[tf.Variable]:
        if isinstance(x, tf.random.Generator):
            return (x.state,)
        return x.variables if isinstance(x, tf.Module) else ()

    def stored_tensors(self, variable: Any) -> Sequence[Any]:
        value = stored_value(variable)
        return (value, *getattr(value, "values", ()))

    def step_functions(
        self, model: keras.Model, kind: str, strategy: Any
    ) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        step = getattr(model, f"{kind}_step")

        def step_on_replicas(batch):
            # TensorFlow warns of the costs of eager steps.
            logger = tf.get_logger()
            logger.addFilter(_discard)
            try:
                return TrainingStrategy(strategy, model, True).run(step, args=(batch,))
            finally:
                logger.removeFilter(_discard)

        return step_on_replicas, step


def _discard(record: Any) -> bool:
    return False
