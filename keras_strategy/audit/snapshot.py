"""Snapshot of all state that a step can change, to restore it after an audit.

State is found by walking from the model: variables, tensors of the backend, NumPy
arrays, and the attributes and containers of layers, models and users' objects.
"""

import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from keras_strategy.core.per_replica_attributes import ContainerContents
from keras_strategy.core.registry import get_engine
from keras_strategy.keras_patches.random import call_state_restorer
from keras_strategy.keras_patches.variables_optimizers import stored_value
from keras_strategy.training.sharding import is_sharded
from keras_strategy.training.variable_sync import is_sync_on_read
from keras_strategy.values import DistributedValues

_KERAS_PARTS = (
    keras.Layer,
    keras.metrics.Metric,
    keras.losses.Loss,
    keras.optimizers.Optimizer,
    keras.random.SeedGenerator,
)
# Objects of these packages and kinds are not walked into.
_LIBRARIES = {"keras", "keras_strategy", "torch", "tensorflow", "jax", "numpy"}
_NO_STATE = (
    *(str, bytes, int, float, complex, bool, type(None), type, range),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType),
    *(types.ModuleType, DistributedValues),
)
_ABSENT = object()

# Operations that compute each element of the result from the elements of the inputs at
# the same place, if these have one shape or broadcast to it.
_ELEMENTWISE = frozenset(
    re.findall(
        r"\w+",
        "Abs Absolute Add Arccos Arccosh Arcsin Arcsinh Arctan Arctan2 Arctanh Cast "
        "Cbrt Ceil Celu Clip Cos Cosh Divide DivideNoNan Elu Equal Erf Erfc Erfinv Exp "
        "Exp2 Expm1 Floor FloorDivide Fmax Fmin Gelu Greater GreaterEqual HardSigmoid "
        "HardSilu HardTanh Hypot Isfinite Isinf Isnan LeakyRelu Less LessEqual Log "
        "Log10 Log1p Log2 LogSigmoid Logaddexp LogicalAnd LogicalNot LogicalOr "
        "LogicalXor Maximum Minimum Mod Multiply NanToNum Negative NotEqual OnesLike "
        "Power Reciprocal Relu Relu6 Round Rsqrt SaturateCast Selu Sigmoid Sign Silu "
        "Sin Sinh Softplus Softsign Sqrt Square StopGradient Subtract Tan Tanh "
        "TrueDivide Trunc Where ZerosLike ",
    )
)
# Keras's layers that call code of the user's.
_WRAPPERS = {"Lambda", "TorchModuleWrapper", "TFSMLayer", "JaxLayer", "FlaxLayer"}


class Snapshot:
    """The state that can be reached from some objects."""

    def __init__(self, strategy: Any, roots: Iterable[Any]):
        self._group = strategy.extended.group
        self.variables: list[Any] = []  # those that are initialized
        # The layers, metrics, losses, optimizers and users' objects.
        self.objects: list[Any] = []
        others: list[Any] = []
        for found in _walk(list(roots)):
            if isinstance(found, keras.Variable):
                if stored_value(found) is not None:
                    self.variables.append(found)
            else:
                others.append(found)
                if _has_state(found):
                    self.objects.append(found)
        adapter = get_engine().audit
        self._restorers: list[Callable[[], None]] = []
        for variable in self.variables:
            self._restorers += self._variable_restorers(variable)
        owned = {id(x) for v in self.variables for x in adapter.stored_tensors(v)}
        for other in others:
            restorer = _restorer(other)
            if restorer is None and id(other) not in owned:
                restorer = adapter.tensor_restorer(other)
            if restorer is not None:
                self._restorers.append(restorer)
        self._restorers.append(call_state_restorer())

    def _variable_restorers(self, variable: Any) -> list[Callable[[], None]]:
        group = self._group
        if is_sharded(variable) and not variable.trainable:
            return []  # of an optimizer, which applies no gradients meanwhile
        values = [_to_numpy(x) for x in group.components(variable)]
        first, *rest = values
        if not is_sync_on_read(variable) and all(_equal(first, x) for x in rest):
            values = [first] * len(values)  # keeps one copy

        trainable = variable.trainable

        def restore():
            if variable.trainable != trainable:
                variable.trainable = trainable
            current = group.components(variable)
            if not all(map(_equal, map(_to_numpy, current), values)):
                dtype = variable.dtype
                parts = [ops.convert_to_tensor(value, dtype) for value in values]
                group.assign_components(variable, parts)

        return [restore, *get_engine().audit.gradient_restorers(variable)]

    def values(self) -> list[np.ndarray | None]:
        """Return the variables' values as one device has them; None without one."""
        return [
            None
            if (is_sharded(variable) and not variable.trainable)
            or (is_sync_on_read(variable) and variable.aggregation == "none")
            else _to_numpy(variable.value)
            for variable in self.variables
        ]

    def differing_components(self) -> list[Any]:
        """Return the mirrored variables whose components differ."""
        found = []
        for variable in self.variables:
            if not (is_sync_on_read(variable) or is_sharded(variable)):
                first, *rest = map(_to_numpy, self._group.components(variable))
                if not all(_equal(first, x) for x in rest):
                    found.append(variable)
        return found

    def restore(self) -> None:
        """Set all state to what it was."""
        for restore in self._restorers:
            restore()


def find_objects(roots: list[Any]) -> list[Any]:
    """Return the layers, metrics, losses, optimizers and users' objects."""
    return [x for x in _walk(roots) if _has_state(x)]


def _walk(roots: list[Any]) -> Iterator[Any]:
    """Yield all objects with state that can be reached, each once."""
    seen: set[int] = set()
    stack = list(reversed(roots))
    while stack:
        x = stack.pop()
        if isinstance(x, _NO_STATE) or id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, tuple | frozenset):
            stack += x
            continue
        if isinstance(x, list | set):
            stack += x
        elif isinstance(x, dict):
            stack += x.values()
        elif _has_state(x):
            stack += vars(x).values()
        elif tensors := get_engine().audit.module_tensors(x):
            stack += tensors
            continue
        elif not hasattr(x, "shape"):
            continue
        yield x


def _has_state(x: Any) -> bool:
    """Return True for a part of Keras and an object whose class the user wrote."""
    package = type(x).__module__.partition(".")[0]
    is_library = package in _LIBRARIES or package in sys.stdlib_module_names
    return isinstance(x, _KERAS_PARTS) or (hasattr(x, "__dict__") and not is_library)


def _restorer(x: Any) -> Callable[[], None] | None:
    """Return a function that restores an array, a container or an object."""
    if isinstance(x, np.ndarray):
        copy = x.copy()
        return lambda: None if _equal(x, copy) else np.copyto(x, copy)
    if isinstance(x, list | dict | set):
        return _container_restorer(x)
    if not _has_state(x):
        return None
    attributes = dict(vars(x))

    def restore():
        current = vars(x)
        for name in current.keys() - attributes.keys():
            del current[name]
        for name, value in attributes.items():
            # Not `setattr`, which may have effects elsewhere.
            if current.get(name, _ABSENT) is not value:
                current[name] = value

    return restore


def _container_restorer(x: Any) -> Callable[[], None]:
    place = ContainerContents(x)
    contents = place.read()
    identities = _identities(contents)

    def restore():
        if _identities(place.read()) != identities:
            place.write(contents)

    return restore


def _identities(contents: Any) -> Any:
    """Return what changes if an element of a container is replaced."""
    if isinstance(contents, dict):
        return [(key, id(value)) for key, value in contents.items()]
    if isinstance(contents, list | set):
        return list(map(id, contents))
    return id(contents)  # it differs between the replicas


def _to_numpy(x: Any) -> np.ndarray:
    return get_engine().audit.host_copy(ops.convert_to_tensor(x))


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Return True if two arrays are equal, and NaN where the other is."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(np.all((a == b) | ((a != a) & (b != b))))


def find_user_code(objects: list[Any]) -> Any:
    """Return the first object that is not known to keep rows apart, or None."""
    for part in objects:
        if not is_keras(type(part)) or type(part).__name__ in _WRAPPERS:
            return part
        is_operation = isinstance(part, keras.Operation)
        if is_operation and not isinstance(part, keras.Layer) and _mixes_rows(part):
            return part
        for name, value in vars(part).items():
            if _works_along_rows(name, value) or _is_users_function(value):
                return part
        if isinstance(part, keras.Model):
            for operation in getattr(part, "operations", ()):
                if not isinstance(operation, keras.Layer) and _mixes_rows(operation):
                    return operation
    return None


def _mixes_rows(operation: Any) -> bool:
    """Return True unless an operation is known to keep rows apart."""
    tensors = tree.flatten([operation.input, operation.output])
    ranks = {len(x.shape) for x in tensors}  # (n, d) and (n, 1, d) give (n, n, d)
    is_elementwise = type(operation).__name__ in _ELEMENTWISE and len(ranks) == 1
    return not is_elementwise or any(x.shape[:1] != (None,) for x in tensors)


def is_keras(part: Any) -> bool:
    """Return True for a class or function of Keras or of this library."""
    return (getattr(part, "__module__", None) or "").startswith(
        ("keras.", "keras_strat")
    )


def _is_users_function(value: Any) -> bool:
    """Return True for a function, but not for a method or an object with state."""
    is_function = callable(value) and hasattr(value, "__code__")
    return is_function and not hasattr(value, "__self__") and not is_keras(value)


def _works_along_rows(name: str, value: Any) -> bool:
    """Return True for the batch dimension as an axis, or a loss for each row."""
    if name == "reduction":
        return value in (None, "none")  # TensorFlow adds up the gradients of rows
    if name not in ("axis", "axes"):
        return False
    axes = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(axis, int) and axis == 0 for axis in axes)
