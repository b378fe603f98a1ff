"""Backup files, written atomically and verified when read, and random states.

A file is a NumPy archive of arrays and a JSON text. It is written to a temporary name,
synced and renamed, so that a killed process leaves the previous file intact. The last
two are kept: if the checksums of one fail, the one before it is used. Third-party state
is encoded in JSON, without pickle.

Sharded variables are gathered one at a time, and the arrays are spilled to disk until
the file is written: all of them may not fit into the host's memory.

Keras draws from process-wide random generators to shuffle arrays and to seed layers. If
each worker drew different numbers, the workers would read different batches.
"""

import base64
import contextlib
import errno
import json
import logging
import os
import pathlib
import random
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes  # a dependency of Keras
import numpy as np

from keras_strategy.cluster.membership import Cluster, json_digest
from keras_strategy.core.registry import get_engine

logger = logging.getLogger("keras_strategy")

# Key that marks an encoded value of a type that JSON lacks.
_MARK = "__"
# Smaller arrays stay in memory.
MIN_SPILL_BYTES = 2**16

_FACTS = "facts.json"
_ANY = re.compile(".*")
_BACKUP = re.compile(r"backup-\d{9}\.npz")
_PARTIAL = re.compile(r"\.backup-\d{9}\.npz\.part")
_DAMAGED = ".damaged"
_MAX_BACKUPS = 2
# Files of Keras's own BackupAndRestore.
_KERAS_FILES = ("latest.weights.h5", "training_metadata.json")


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


@dataclass(frozen=True)
class BackupContents:
    facts: dict[str, Any]  # JSON values
    arrays: dict[str, np.ndarray]
    file: pathlib.Path


class BackupFolder:
    def __init__(self, path: str | os.PathLike):
        self._path = pathlib.Path(path)
        self._spill = ArraySpill(self._path / "backup")
        self.spill = self._spill.add  # arrays for the next backup

    def read(self) -> BackupContents | None:
        """Return the last intact backup, or None; rename damaged ones."""
        self._remove(_PARTIAL)
        for file in reversed(self._files(_BACKUP)):
            try:
                with (
                    file.open("rb") as opened,
                    np.load(opened, allow_pickle=False) as archive,
                ):
                    metadata = json.loads(archive[_FACTS].tobytes())
                    plain = {name: archive[name] for name in metadata["dtypes"]}
            except Exception as error:
                # A flipped bit may cause any error, such as an unknown compression
                # method. But an unreadable disk may become readable again.
                is_disk = isinstance(error, OSError) and error.errno != errno.EINVAL
                if is_disk or isinstance(error, MemoryError):
                    raise
                renamed = file.with_name(file.name + _DAMAGED)
                os.replace(file, renamed)
                logger.error(
                    "The backup %s is damaged (%s) and was renamed to %s. The one "
                    "before it is used.",
                    *(file, f"{type(error).__name__}: {error}", renamed.name),
                )
            else:
                arrays = {
                    name: plain[name].view(getattr(ml_dtypes, dtype, dtype))
                    for name, dtype in metadata["dtypes"].items()
                }
                return BackupContents(metadata["facts"], arrays, file)
        if any(file.name.endswith(_DAMAGED) for file in self._files()):
            raise ValueError(
                f"All backups in {self._path} are damaged. Remove the folder to train "
                "from the beginning."
            )
        keras_files = [name for name in _KERAS_FILES if (self._path / name).exists()]
        if keras_files:
            raise ValueError(
                f"{self._path} contains a backup from Keras's own callback "
                f"({', '.join(keras_files)}), which lacks the state for an exact "
                "resume. Remove it to train from the beginning, or use another folder."
            )
        return None

    def write(self, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Write a backup of JSON values and arrays; remove old ones."""
        with self._spill:
            self._spill.check()
            self._path.mkdir(parents=True, exist_ok=True)
            files = self._files(_BACKUP)
            last = int(files[-1].stem.removeprefix("backup-")) if files else 0
            target = self._path / f"backup-{last + 1:09}.npz"
            part = self._path / f".{target.name}.part"
            try:
                with part.open("wb") as file:
                    _write(file, facts, arrays)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(part, target)
            finally:
                part.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # some systems cannot sync a folder
                folder = os.open(self._path, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
            for old in files[: len(files) + 1 - _MAX_BACKUPS]:
                old.unlink(missing_ok=True)

    def clear(self) -> None:
        self._remove(_PARTIAL)
        self._remove(_BACKUP)
        with contextlib.suppress(OSError):
            self._path.rmdir()

    def _remove(self, pattern: re.Pattern) -> None:
        for file in self._files(pattern):
            file.unlink(missing_ok=True)

    def _files(self, pattern: re.Pattern = _ANY) -> list[pathlib.Path]:
        names = os.listdir(self._path) if self._path.is_dir() else []
        return [self._path / name for name in sorted(names) if pattern.fullmatch(name)]


def _write(file: Any, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    dtypes = {name: str(array.dtype) for name, array in arrays.items()}
    text = json.dumps({"facts": facts, "dtypes": dtypes}).encode()
    plain = {}
    for name, array in arrays.items():
        if array.dtype.isbuiltin != 1:  # NumPy knows the dtype by an extension only
            array = array.view(f"uint{8 * array.dtype.itemsize}")
        plain[name] = array
    plain[_FACTS] = np.frombuffer(text, np.uint8)
    np.savez(file, allow_pickle=False, **plain)
