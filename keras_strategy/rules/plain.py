"""JSON encoding of third-party state, without pickle."""

import base64
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

# What stands in front of what JSON does not have.
_MARK = "__"


def encode(state: Any) -> Any:
    """Return a state of numbers, strings, bytes, None and arrays as a JSON value.

    Raises:
        ValueError: If it contains anything else.
    """
    if state is None or isinstance(state, bool | int | float | str):
        return state
    if isinstance(state, list):
        return [encode(part) for part in state]
    if isinstance(state, tuple):
        return {_MARK: "tuple", "of": [encode(part) for part in state]}
    if isinstance(state, Mapping):
        pairs = [[encode(key), encode(value)] for key, value in state.items()]
        if _MARK not in state and all(isinstance(key, str) for key in state):
            return dict(pairs)
        return {_MARK: "dict", "of": pairs}
    if isinstance(state, bytes):
        return {_MARK: "bytes", "of": base64.b64encode(state).decode()}
    torch = sys.modules.get("torch")
    kind = "array"
    if torch is not None and isinstance(state, torch.Tensor):
        kind, state = "tensor", state.detach().cpu().numpy()
    if isinstance(state, np.ndarray | np.generic) and not state.dtype.hasobject:
        kind = "number" if isinstance(state, np.generic) else kind
        content = base64.b64encode(state.tobytes()).decode()
        return {_MARK: kind, "of": [str(state.dtype), list(state.shape), content]}
    raise ValueError(
        "Expected a state of numbers, texts, bytes, arrays, lists and dicts. Received "
        f"in it: {state!r} of type {type(state).__name__}"
    )


def decode(value: Any) -> Any:
    """Return the state that `packed` encoded."""
    if isinstance(value, list):
        return [decode(part) for part in value]
    if not isinstance(value, dict):
        return value
    if _MARK not in value:
        return {key: decode(part) for key, part in value.items()}
    kind, of = value[_MARK], value["of"]
    if kind == "tuple":
        return tuple(decode(of))
    if kind == "dict":
        return {decode(key): decode(part) for key, part in of}
    if kind == "bytes":
        return base64.b64decode(of)
    dtype, shape, content = of
    array = np.frombuffer(base64.b64decode(content), dtype).reshape(shape).copy()
    torch = sys.modules.get("torch")
    if kind == "tensor" and torch is not None:
        return torch.from_numpy(array)
    return array[()] if kind == "number" else array
