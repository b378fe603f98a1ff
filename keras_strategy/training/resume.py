"""Random states, and third-party state as JSON, without pickle; spilled arrays.

Keras draws from process-wide random generators to shuffle arrays and to seed layers. If
each worker drew different numbers, the workers would read different batches.
"""

import base64
import contextlib
import pathlib
import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_strategy.cluster.membership import Cluster, json_digest
from keras_strategy.core.registry import get_engine

# Key that marks an encoded value of a type that JSON lacks.
_MARK = "__"
# Smaller arrays stay in memory.
MIN_SPILL_BYTES = 2**16


def encode(state: Any) -> Any:
    """Return a state of numbers, strings, bytes, None and arrays as a JSON value."""
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
        "Expected state of numbers, strings, bytes, arrays, lists and dicts. Received "
        f"in it: {state!r} of type {type(state).__name__}"
    )


def decode(value: Any) -> Any:
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


def state_of_this_worker(states: list[Any], cluster: Cluster | None) -> Any:
    """Return this worker's dataset state, from those of the workers of a backup."""
    if all(state == states[0] for state in states):
        return states[0]
    workers = 1 if cluster is None else cluster.size
    if len(states) != workers:
        raise ValueError(
            "Each worker's dataset had a different state, so the training must resume "
            "with the same number of workers. Received: "
            f"{workers} workers, but the backup was written by {len(states)}."
        )
    return states[0 if cluster is None else cluster.rank]


def sync_random_states(cluster: Cluster, digests: Sequence[str] | None = None) -> None:
    """Set the generators to the chief's; `digests` are exchanged if not given."""
    operation = "the comparison of random states"
    digests = digests or cluster.exchange(operation, random_state_digest())
    if len(set(digests)) == 1:
        return
    state = get_random_state() if cluster.is_chief else None
    states = cluster.exchange("the chief's random state", state)
    if not cluster.is_chief:
        set_random_state(states[0])


def random_state_digest() -> str:
    return json_digest(get_random_state())


def get_random_state() -> dict[str, Any]:
    """Return the states of the process-wide random generators as JSON values."""
    version, numbers, gauss = random.getstate()
    torch = sys.modules.get("torch")  # on any backend, its DataLoader draws from it
    others = {
        "numpy": np.random.get_state(legacy=True),
        "engine": get_engine().random_state(),
        "torch": None if torch is None else torch.get_rng_state(),
    }
    return {"python": [version, list(numbers), gauss], **encode(others)}


def set_random_state(state: dict[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(decode(state["numpy"]))
    if state["engine"] is not None:
        get_engine().set_random_state(decode(state["engine"]))
    torch = sys.modules.get("torch")
    if torch is not None and state["torch"] is not None:
        torch.set_rng_state(decode(state["torch"]))


class ArraySpill(contextlib.AbstractContextManager["ArraySpill"]):
    """Files of arrays in a folder beside a path, which only writing workers have."""

    def __init__(self, path: pathlib.Path | None):
        self._folder = None if path is None else path.with_name(f".{path.name}.spill")
        self._count = 0
        self._error: OSError | None = None

    def add(self, array: np.ndarray) -> np.ndarray:
        """Return the array, memory-mapped from disk if it is large."""
        if self._error is not None or self._folder is None:
            return np.empty(0, array.dtype)
        if not array.ndim or array.nbytes < max(MIN_SPILL_BYTES, 1):
            return array
        try:
            if not self._count:  # remove what a killed process left
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder.mkdir(parents=True)
            file = self._folder / str(self._count)
            self._count += 1
            array.tofile(file)
            # Copy-on-write, as some backends require writable memory.
            return np.memmap(file, array.dtype, "c", shape=array.shape)
        except OSError as error:
            self._error = error  # `check` raises it, so that all workers go on together
            return np.empty(0, array.dtype)

    def check(self) -> None:
        """Raise the first failed write's error, if any."""
        if self._error is not None:
            raise self._error

    def __exit__(self, *_: object) -> None:
        self._count, self._error = 0, None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
