"""Consistency check of the workers before a `fit` or similar call.

A worker with another optimizer or schedule would train to the end, to other weights. So
before the first step each worker sends a signature of its call. It leaves out what may
differ between equal programs: counters in names, paths, what the chief broadcasts
(initial values, seeds, the learning rate), and what cannot be compared (the code of a
lambda).
"""

from __future__ import annotations

import inspect
import itertools
import math
import numbers
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from keras_strategy.cluster.membership import Cluster
from keras_strategy.core.collectives import array_digest
from keras_strategy.errors import WorkersDifferError

# Fields that may differ between equal programs: built models, counters, and what
# determines initial values, which the chief broadcasts.
_IGNORED = {
    *("build_config", "compile_config", "build_input_shape", "shared_object_id"),
    "seed",
}
_MAX_DEPTH = 40
_MAX_TEXT = 200
# Elements of object arrays of these types are compared by value, others by class.
_PLAIN = (str, bytes, numbers.Number, type(None))
_NUMBERS = (numbers.Number, np.generic)
# Bytes of an array's first rows that are compared, and the number of sampled rows of a
# larger one, each of which may need a disk page.
_HEAD_BYTES = 1 << 20
_SAMPLED_ROWS = 1024
_ARGUMENTS = (
    *("batch_size", "epochs", "initial_epoch", "steps_per_epoch", "steps", "shuffle"),
    *("class_weight", "validation_split", "validation_steps"),
    *("validation_batch_size", "validation_freq"),
)
_COMPILED = (
    *("loss", "loss_weights", "metrics", "weighted_metrics", "auto_scale_loss"),
    *("steps_per_execution", "jit_compile", "run_eagerly"),
)
_DATA = ("x", "y", "sample_weight", "validation_data")
# Keras settings that change results; the layers contain `dtype_policy`.
_KERAS_SETTINGS = (
    *("floatx", "epsilon", "image_data_format", "max_epochs", "max_steps_per_epoch"),
    "is_flash_attention_enabled",
)

Item = list[Any]


def check_workers_agree(
    cluster: Cluster, signature: list[Item], value: Any, method: str = "fit"
) -> list[Any]:
    """Check that all workers have equal signatures, and exchange a JSON value."""
    operation = f"the start of {method}"
    values, difference = cluster.first_difference(operation, signature, value)
    if difference is None:
        return values
    _, items = difference
    fields = {None if item is None else item[0] for item in items}
    if len(fields) == 1:
        (field,) = fields
        texts = [item[1] for item in items]
    else:
        # A worker has an additional field, so the items belong to different fields.
        field = min(filter(None, fields))
        texts = [
            "nothing" if item is None else f"{item[0]} = {item[1]}" for item in items
        ]
    raise WorkersDifferError(
        f"All workers must do the same in `{method}`. They differ in {field} "
        f"({cluster.format_by_value(texts)})."
    )


def fit_signature(
    model: keras.Model,
    compiled: Mapping[str, Any],
    arguments: Mapping[str, Any],
    callbacks: list[Any],
    lookups: Iterable[Any] = (),
) -> list[Item]:
    description = describe(model)
    if not isinstance(description, Mapping):  # a subclass without `get_config`
        layers = [describe(layer) for layer in model.layers]
        description = {"class": description, "layers": layers}
    fields: dict[str, Any] = {
        "optimizer": describe(getattr(model, "optimizer", None)),
        **{name: describe(compiled.get(name)) for name in _COMPILED},
        **_call_fields(arguments),
        "callbacks": [type(callback).__name__ for callback in callbacks],
        **{f"callback {type(c).__name__}": _settings(c) for c in callbacks},
        "model": description,
        **dict(map(_adapted_state, itertools.count(), lookups)),
    }
    return _items(fields)


def _adapted_state(index: int, layer: Any) -> tuple[str, Any]:
    """Return what `adapt` has computed and neither config nor variables hold."""
    weights: dict[str, Any] = {}
    layer.save_own_variables(weights)
    name = layer.name.rstrip("_0123456789")  # without a counter
    return f"adapted layer {index} '{name}'", {
        "vocabulary": list(map(str, layer.get_vocabulary())),
        **{key: _array(value) for key, value in weights.items()},
    }


def call_signature(arguments: Mapping[str, Any]) -> list[Item]:
    """Return the signature of `evaluate`, `train_on_batch` or the like."""
    return _items(_call_fields(arguments))


def _call_fields(arguments: Mapping[str, Any]) -> dict[str, Any]:
    settings = {name: getattr(keras.config, name)() for name in _KERAS_SETTINGS}
    return {
        **{f"keras.config.{name}": describe(x) for name, x in settings.items()},
        **{f"argument {name}": describe(arguments.get(name)) for name in _ARGUMENTS},
        **{f"argument {name}": _data(arguments.get(name)) for name in _DATA},
    }


def _items(fields: Mapping[str, Any]) -> list[Item]:
    names: dict[str, str] = {}
    _number_names(fields, names)
    leaves = (_leaves(field, value, names) for field, value in fields.items())
    return list(itertools.chain.from_iterable(leaves))


def describe(thing: Any, depth: int = 0) -> Any:
    """Return a JSON description of an object, which may be its class alone."""
    if thing is None or isinstance(thing, bool | str):
        return thing
    if isinstance(thing, _NUMBERS):
        return repr(thing.item() if isinstance(thing, np.generic) else thing)
    if depth > _MAX_DEPTH or isinstance(thing, os.PathLike | bytes):
        return _name(type(thing))
    if isinstance(thing, np.ndarray):
        return _array(thing)
    if isinstance(thing, Mapping):
        if thing.get("class_name") == "__lambda__":
            return "a lambda"
        return {
            str(key): describe(value, depth + 1)
            for key, value in thing.items()
            if key not in _IGNORED
            # A number is broadcast by the chief; a schedule is not.
            and not (key == "learning_rate" and isinstance(value, _NUMBERS))
        }
    if isinstance(thing, list | tuple):
        return [describe(value, depth + 1) for value in thing]
    if inspect.isroutine(thing) or inspect.isclass(thing):
        return _name(thing)
    if isinstance(thing, keras.Variable):
        return "a variable"
    try:
        config = thing.get_config()
    except Exception:
        config = None
    if not isinstance(config, Mapping):
        return _name(type(thing))
    return {"class": _name(type(thing)), **describe(config, depth + 1)}


# String attributes that are settings; others may be paths or contain counters.
_STRING_SETTINGS = {"save_freq", "mode"}
# State of callbacks.
_CALLBACK_STATE = {
    *("params", "model", "validation_data", "verbose", "best", "best_weights"),
    *("best_epoch", "wait", "stopped_epoch", "cooldown_counter"),
    "epochs_since_last_save",
}


def _settings(callback: Any) -> dict[str, Any]:
    """Return a callback's public attributes of plain values."""
    settings = {}
    for name, value in sorted(vars(callback).items()):
        if name.startswith("_") or name in _CALLBACK_STATE:
            continue
        is_plain = value is None or isinstance(value, _NUMBERS)
        if is_plain or name in _STRING_SETTINGS:
            settings[name] = describe(value)
        elif inspect.isroutine(value):
            settings[name] = _name(value)
    return settings


def _data(data: Any) -> Any:
    """Return a description of data; batches from iterators are compared when read."""
    if isinstance(data, list | tuple):
        return [_data(part) for part in data]
    if isinstance(data, Mapping):
        return {str(key): _data(part) for key, part in data.items()}
    if data is None:
        return None
    if _shape(data) is not None:
        return _array(data)
    shape = getattr(data, "shape", ())  # of ragged rows, unknown in part
    sizes = tuple(shape) if isinstance(shape, Iterable) else ()
    return f"{_name(type(data))}{sizes or ''}"


def _array(array: Any) -> str:
    # Without the type: tensors, arrays and tables are equivalent.
    rows = _some_rows(array)
    dtype = getattr(array if rows is None else rows, "dtype", None)
    layout = f"an array {_shape(array)} of {dtype}"
    return layout if rows is None else f"{layout}, whose rows are {_digest(rows)}"


def rows_digest(array: Any) -> str:
    """Return a digest of rows; an empty one if this worker cannot read them alone."""
    rows = _some_rows(array)
    return "" if rows is None else _digest(rows)


def _digest(rows: np.ndarray) -> str:
    if rows.dtype.hasobject:
        words = [
            repr(value) if isinstance(value, _PLAIN) else _name(type(value))
            for value in rows.reshape(-1).tolist()
        ]
        rows = np.frombuffer(repr(words).encode(), "uint8")
    return array_digest(rows)[:12]


def _shape(data: Any) -> tuple[int, ...] | None:
    shape = getattr(data, "shape", None)
    # Ragged tensors have unknown sizes.
    if not isinstance(shape, Iterable) or None in (sizes := list(shape)):
        return None
    return tuple(map(int, sizes))


def _some_rows(data: Any) -> np.ndarray | None:
    """Return all rows, or the first and a sample of a large array."""
    shape = _shape(data)
    if not shape:
        return None
    itemsize = getattr(getattr(data, "dtype", None), "itemsize", 8)
    num_rows = max(1, _HEAD_BYTES // max(1, math.prod(shape[1:]) * itemsize))
    try:
        if shape[0] <= num_rows:
            return _to_numpy(data)
        rows = getattr(data, "iloc", data)
        step = -(-shape[0] // min(num_rows, _SAMPLED_ROWS))
        return np.concatenate([*map(_to_numpy, (rows[:num_rows], rows[::step]))])
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError):
        return None  # large and sparse, on another backend's device or of other workers


def _to_numpy(rows: Any) -> np.ndarray:
    if hasattr(rows, "toarray"):  # a sparse SciPy array
        rows = rows.toarray()
    if keras.ops.is_tensor(rows):
        return keras.ops.convert_to_numpy(rows)
    return np.asarray(rows)


def _number_names(value: Any, names: dict[str, str], has_name: bool = True) -> None:
    """Assign numbers to names in configs, as names count what a process made."""
    if isinstance(value, Mapping):
        name = value.get("name")
        if has_name and isinstance(name, str):
            names.setdefault(name, f"#{len(names)}")
        is_policy = str(value.get("class_name")).endswith("DTypePolicy")
        for part in value.values():
            _number_names(part, names, not is_policy)
    elif isinstance(value, list):
        for part in value:
            _number_names(part, names)


def _leaves(path: str, value: Any, names: Mapping[str, str]) -> Iterator[Item]:
    if isinstance(value, list):
        value = [part for part in value if not _is_added_input(part)]
    if isinstance(value, Mapping) and value:
        # The class first: objects of different classes differ in most fields.
        for key in sorted(value, key=lambda key: (key != "class", key)):
            inner = f"{path}.{key}".replace(".config.", ".")
            yield from _leaves(inner, value[key], names)
    elif isinstance(value, list) and any(isinstance(v, Mapping | list) for v in value):
        for index, part in enumerate(value):
            yield from _leaves(f"{path}[{index}]", part, names)
    else:
        if isinstance(value, str):
            value = names.get(value, value)
        elif isinstance(value, list):
            value = [names.get(part, part) for part in value]
        text = value if isinstance(value, str) else repr(value)
        if len(text) > _MAX_TEXT:
            digest = array_digest(np.frombuffer(text.encode(), "uint8"))[:12]
            text = f"{text[:_MAX_TEXT]}... ({digest})"
        yield [path, text]


def _is_added_input(part: Any) -> bool:
    """Return True for the input layer that `Sequential` adds when it is built."""
    is_layer = isinstance(part, Mapping) and "inbound_nodes" not in part
    return is_layer and part.get("class_name") == "InputLayer"


def _name(thing: Callable | type) -> str:
    if not hasattr(thing, "__qualname__"):
        thing = type(thing)
    return f"{thing.__module__}.{thing.__qualname__}"
