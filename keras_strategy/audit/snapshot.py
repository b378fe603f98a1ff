"""Snapshot of all state that a step can change, to restore it after an audit.

State is found by walking from the model: variables, tensors of the backend, NumPy
arrays, random generators, and the attributes and containers of layers, models and
users' objects. The same walk finds code that is not known to keep rows apart.
"""

import contextlib
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from keras_strategy.core.per_replica_attributes import ContainerContents
from keras_strategy.core.protocols import Strategy
from keras_strategy.core.registry import get_engine
from keras_strategy.keras_patches.internals import stored_value
from keras_strategy.keras_patches.random import call_state_restorer
from keras_strategy.training.sharding import is_sharded
from keras_strategy.training.variable_sync import is_sync_on_read
from keras_strategy.values import DistributedValues

_KERAS_PARTS = (
    keras.Operation,
    keras.metrics.Metric,
    keras.losses.Loss,
    keras.optimizers.Optimizer,
    keras.random.SeedGenerator,
)
# Objects of these packages and kinds are not walked into: others share them.
_LIBRARIES = {"keras", "keras_strategy", "torch", "tensorflow", "jax", "jaxlib"}
_LIBRARIES |= {"numpy", *sys.stdlib_module_names} - {"argparse", "types"}
_PLAIN = (str, bytes, int, float, complex, type(None))
_NO_STATE = (*_PLAIN, type, range, types.ModuleType, DistributedValues)
# Objects of these modules are copied and restored as by `pickle`.
_PICKLED = re.compile(r"_io|functools|random|numpy\.random\..+|torch\._C")

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
# Keras's layers that draw from generators which replicas share.
_WRAPPERS |= {"AugMix", "RandomElasticTransform"}


class Snapshot:
    """The state that can be reached from some objects."""

    def __init__(self, strategy: Strategy, roots: Iterable[Any]):
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
            restorers = list(_restorers(other))
            if not restorers and id(other) not in owned:
                restorers = filter(None, [adapter.tensor_restorer(other)])
            self._restorers += restorers
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
        # Written by a collective on JAX, so all workers have to do it.
        is_shared = group.workers is not None and is_sync_on_read(variable)

        def restore():
            if variable.trainable != trainable:
                variable.trainable = trainable
            current = group.components(variable)
            if is_shared or not all(map(_equal, map(_to_numpy, current), values)):
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
    """Yield all objects with state or code that can be reached, each once."""
    seen: dict[int, Any] = {}  # keeps them, so that no other gets the same id
    stack = list(reversed(roots))
    while stack:
        x = stack.pop()
        try:
            parts = None if id(x) in seen or isinstance(x, _NO_STATE) else _parts(x)
        except Exception:  # Any attribute may raise, as those of a weak reference do.
            continue
        if parts is not None:
            seen[id(x)] = x
            stack += parts
            yield x


def _parts(x: Any) -> Iterable[Any] | None:
    """Return what an object holds; None if it is neither state nor code."""
    is_container = isinstance(x, tuple | frozenset | list | set | deque | dict)
    parts = list(x.values() if isinstance(x, dict) else x) if is_container else []
    if _has_state(x) or (callable(x) and type(x).__module__.startswith("keras.")):
        parts += vars(x).values()
    elif _PICKLED.fullmatch(type(x).__module__):
        parts += x.__reduce_ex__(2)[1:3]
    elif tensors := get_engine().audit.module_tensors(x):
        parts += tensors
    elif callable(x):
        parts.append(getattr(x, "__self__", None))
    elif not is_container and not hasattr(x, "shape"):
        return None
    return parts


def _has_state(x: Any) -> bool:
    """Return True for a part of Keras and an object whose class the user wrote."""
    is_library = type(x).__module__.partition(".")[0] in _LIBRARIES
    return isinstance(x, _KERAS_PARTS) or (hasattr(x, "__dict__") and not is_library)


def _restorers(x: Any) -> Iterator[Callable[[], None]]:
    """Yield functions that restore an array, a container or an object."""
    if isinstance(x, np.ndarray):
        copy = x.copy()
        yield lambda: None if _equal(x, copy) else np.copyto(x, copy)
    if isinstance(x, list | dict | set | deque):
        yield _container_restorer(x)
    if _has_state(x):
        attributes = dict(vars(x))

        def restore():
            # Not `setattr`, which may have effects elsewhere.
            for name in vars(x).keys() - attributes.keys():
                del vars(x)[name]
            vars(x).update(attributes)

        yield restore
    elif _PICKLED.fullmatch(type(x).__module__) and hasattr(x, "__setstate__"):
        pickled: Any = x
        state = pickled.__reduce_ex__(2)[2]
        yield lambda: pickled.__setstate__(state)


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
    if isinstance(contents, list | set | deque):
        return list(map(id, contents))
    return id(contents)  # it differs between the replicas


def _to_numpy(x: Any) -> np.ndarray:
    return get_engine().audit.host_copy(ops.convert_to_tensor(x))


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Return True if two arrays are equal, and NaN where the other is."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(np.all((a == b) | ((a != a) & (b != b))))


def read_settings(roots: list[Any]) -> list[tuple[str, Any]]:
    """Return the plain values of attributes and containers that can be reached."""
    found: list[tuple[str, Any]] = []
    for x in _walk(roots):
        named = vars(x) if _has_state(x) else x if isinstance(x, dict) else {}
        items = enumerate(x) if isinstance(x, list | tuple | deque) else named.items()
        found += [
            (f"{type(x).__name__}.{key}", value)
            for key, value in items
            # Keras sets `training` of torch modules, this library names that begin so.
            if isinstance(value, _PLAIN) and not re.match("training$|_ks_", str(key))
        ]
    return found


def find_user_code(objects: list[Any]) -> Any:
    """Return the first object that is not known to keep rows apart, or None."""
    for x in _walk(objects):
        with contextlib.suppress(Exception):  # What cannot be inspected is not known.
            if _is_known(x):
                continue
        return x
    return None


def _is_known(x: Any) -> bool:
    """Return True for data, and for code that keeps rows apart."""
    if isinstance(x, keras.Variable):
        return not getattr(x, "overwrite_with_gradient", False)
    if not isinstance(x, _KERAS_PARTS):
        # Torch's containers of parameters can be called, too.
        if not _has_state(x) and (not callable(x) or hasattr(x, "keys")):
            return True
        code = _code_of(x)
        return is_keras(code) and not _module_of(code).startswith("keras.src.ops.")
    if not is_keras(type(x)) or type(x).__name__ in _WRAPPERS:
        return False
    if isinstance(x, keras.Operation) and not isinstance(x, keras.Layer):
        return not _mixes_rows(x)
    # It may mix rows, and not every Keras divides its value by their number.
    if getattr(x, "activity_regularizer", None) is not None:
        return False
    return not _works_along_rows(x)


def _mixes_rows(operation: Any) -> bool:
    """Return True unless an operation is known to keep rows apart."""
    tensors = tree.flatten([operation.input, operation.output])
    ranks = {len(x.shape) for x in tensors}  # (n, d) and (n, 1, d) give (n, n, d)
    is_elementwise = type(operation).__name__ in _ELEMENTWISE and len(ranks) == 1
    return not is_elementwise or any(x.shape[:1] != (None,) for x in tensors)


def is_keras(part: Any) -> bool:
    """Return True for a class or function of Keras or of this library."""
    return _module_of(part).startswith(("keras.", "keras_strat"))


def _code_of(x: Any) -> Any:
    """Return the function or class whose code a call runs."""
    code = x if hasattr(x, "__globals__") else type(x)
    # What a library wraps or compiles.
    inner = getattr(x, "python_function", getattr(x, "__wrapped__", None))
    is_library = _module_of(code).partition(".")[0] in _LIBRARIES
    return _code_of(inner) if is_library and inner is not None else code


def _module_of(part: Any) -> str:
    # `functools.wraps` changes `__module__` of a function.
    names = getattr(part, "__globals__", {})
    return names.get("__name__") or getattr(part, "__module__", None) or ""


def _works_along_rows(part: Any) -> bool:
    """Return True for the batch dimension as an axis, or a loss for each row."""
    options = {**vars(part), **vars(part).get("_fn_kwargs", {})}
    if options.get("reduction", "") in (None, "none"):
        return True  # TensorFlow adds up the gradients of rows
    axes = tree.flatten([options.get("axis"), options.get("axes")])
    try:
        rank = min(len(x.shape) for x in tree.flatten(part.input))
    except Exception:  # a loss, or a layer outside of a functional model
        rank = 2
    return any(isinstance(x, int) and (x == 0 or x <= -rank) for x in axes)
