"""Serialization of functions and arguments for workers: copies without variables."""

import io
from typing import Any

import keras

from keras_strategy.cluster_resolver.base import import_extra
from keras_strategy.coordinator.values import RemoteValue, Scheduled, as_tensor
from keras_strategy.core.registry import get_engine

_cloudpickle = import_extra("cloudpickle", "coordinator", "ClusterCoordinator")
# Classes with variables: changes to a worker's copy would be lost silently.
_STATEFUL_TYPES = (
    keras.Variable,
    keras.Layer,
    keras.optimizers.Optimizer,
    keras.metrics.Metric,
    keras.random.SeedGenerator,
)


def serialize(name: str, content: Any) -> bytes:
    """Serialize a function or its arguments.

    Args:
        name: The function's name, for errors.
        content: The object.

    Raises:
        TypeError: If it contains variables or cannot be pickled.
        ValueError: If it contains a `RemoteValue` without a result.
    """
    file = io.BytesIO()
    pickler = _Pickler(name, file)
    try:
        pickler.dump(content)
    except Exception as error:
        if error is pickler.refusal:
            raise
        raise TypeError(
            f"The function or arguments of {name} cannot be sent to a worker: "
            f"{type(error).__name__}: {error}"
        ) from error
    return file.getvalue()


def replace_variables(structure: Any) -> Any:
    """Replace variables in arguments by their values."""
    return keras.tree.map_structure(
        lambda x: x.value if isinstance(x, keras.Variable) else x, structure
    )


class _Pickler(_cloudpickle.Pickler):
    """Pickler that converts tensors and remote values and refuses variables."""

    def __init__(self, name: str, file: io.BytesIO):
        super().__init__(file)
        self._name = name
        self.refusal: Exception | None = None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _STATEFUL_TYPES):
            what = f"{type(obj).__name__} {getattr(obj, 'name', '')!r}"
            self.refusal = TypeError(
                f"{self._name} uses {what} of the coordinator. Workers get copies, "
                "whose changes would be lost. Pass the values as arguments (a "
                "variable, or `model.get_weights()`), create the workers' models in "
                "the function of `create_per_worker_dataset`, and assign the returned "
                "values on the coordinator."
            )
            raise self.refusal
        if isinstance(obj, RemoteValue):
            if not isinstance(obj, Scheduled) or not obj.has_result:
                self.refusal = ValueError(
                    f"{self._name} received a `RemoteValue` that has no value yet. "
                    "Call `join` or its `fetch` first."
                )
                raise self.refusal
            return _to_tensors, (obj.fetch(),)
        if get_engine().is_tensor(obj):
            array = keras.ops.convert_to_numpy(obj)
            return _to_tensor, (array, keras.backend.standardize_dtype(obj.dtype))
        return super().reducer_override(obj)


def _to_tensor(array: Any, dtype: str) -> Any:
    return keras.ops.convert_to_tensor(array, dtype)


def _to_tensors(structure: Any) -> Any:
    return keras.tree.map_structure(as_tensor, structure)
