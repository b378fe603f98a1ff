"""How functions and their arguments travel to workers: as copies, without variables."""

import io
from typing import Any

import keras

from keras_strategy.cluster_resolver.base import import_extra
from keras_strategy.coordinator.values import RemoteValue, Scheduled, as_tensor
from keras_strategy.core.registry import get_engine

_cloudpickle = import_extra("cloudpickle", "coordinator", "ClusterCoordinator")
# What has variables in it: a worker's copy would be changed, and nobody would know.
_WITH_STATE = (
    keras.Variable,
    keras.Layer,
    keras.optimizers.Optimizer,
    keras.metrics.Metric,
    keras.random.SeedGenerator,
)


def packed(name: str, content: Any) -> bytes:
    """A parcel.

    Args:
        name: Of the function, for errors.
        content: What is in it.

    Raises:
        TypeError: If there are variables in it, or what cannot travel.
        ValueError: If there is a `RemoteValue` whose function has not ended.
    """
    file = io.BytesIO()
    pickler = _Pickler(name, file)
    try:
        pickler.dump(content)
    except Exception as error:
        if error is pickler.refusal:
            raise
        raise TypeError(
            f"What {name} needs cannot travel to a worker: "
            f"{type(error).__name__}: {error}"
        ) from error
    return file.getvalue()


def without_variables(structure: Any) -> Any:
    """Arguments, with the values of variables in their place.

    Args:
        structure: The arguments.
    """
    return keras.tree.map_structure(
        lambda x: x.value if isinstance(x, keras.Variable) else x, structure
    )


class _Pickler(_cloudpickle.Pickler):
    """Arrays for tensors, values for remote values, and no variables."""

    def __init__(self, name: str, file: io.BytesIO):
        super().__init__(file)
        self._name = name
        self.refusal: Exception | None = None

    def reducer_override(self, obj: Any) -> Any:
        """See `pickle.Pickler`."""
        if isinstance(obj, _WITH_STATE):
            what = f"{type(obj).__name__} {getattr(obj, 'name', '')!r}"
            self.refusal = TypeError(
                f"{self._name} uses {what} of the coordinator, and workers have copies "
                "that would be changed in vain. Give it the values as arguments (a "
                "variable, or `model.get_weights()`), let workers make models of their "
                "own in the function of `create_per_worker_dataset`, and assign here "
                "what it returns."
            )
            raise self.refusal
        if isinstance(obj, RemoteValue):
            if not isinstance(obj, Scheduled) or not obj.has_result:
                self.refusal = ValueError(
                    f"{self._name} was given a `RemoteValue` that has no value yet. "
                    "Call `join` or its `fetch` before."
                )
                raise self.refusal
            return _tensors, (obj.fetch(),)
        if get_engine().is_tensor(obj):
            array = keras.ops.convert_to_numpy(obj)
            return _tensor, (array, keras.backend.standardize_dtype(obj.dtype))
        return super().reducer_override(obj)


def _tensor(array: Any, dtype: str) -> Any:
    return keras.ops.convert_to_tensor(array, dtype)


def _tensors(structure: Any) -> Any:
    return keras.tree.map_structure(as_tensor, structure)
