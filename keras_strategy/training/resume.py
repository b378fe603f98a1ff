"""JSON encoding of third-party state, without pickle.

Arrays spilled to disk until one file is written of all of them.

Sharded variables are gathered one at a time. A host that kept all of them would need
memory for what no device holds.

Backup files, written atomically and verified when read.

A file is a NumPy archive of arrays and a JSON text. It is written to a temporary name,
synced and renamed, so that a killed process leaves the previous file intact. The last
two are kept: if the checksums of one fail, the one before it is used.
"""

import base64
import contextlib
import errno
import json
import logging
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import ml_dtypes  # a dependency of Keras
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


# Smaller ones stay in memory.
MIN_SPILL_BYTES = 2**16


class ArraySpill:
    """Files of arrays, while it is open; leftovers of a killed process are removed.

    The folder must have no other use. It is None on workers that do not write.
    """

    def __init__(self, folder: pathlib.Path | None):
        self._folder, self._count = folder, 0
        self._error: OSError | None = None

    @classmethod
    def next_to(cls, path: pathlib.Path) -> "ArraySpill":
        """Return a spill in a folder next to a path that will be written."""
        return cls(path.parent / f".{path.name}.aside")

    def add(self, array: np.ndarray) -> np.ndarray:
        """Return the array, memory-mapped from disk if it is large.

        A failure is raised by `check` only, so that all workers continue together.
        """
        if self._error is not None or self._folder is None:
            return np.empty(0, array.dtype)
        if not array.ndim or array.nbytes < max(MIN_SPILL_BYTES, 1):
            return array
        try:
            if not self._count:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder.mkdir(parents=True)
            file = self._folder / str(self._count)
            self._count += 1
            array.tofile(file)
            # Engines may ask for memory to write to; the file keeps what it has.
            return np.memmap(file, array.dtype, "c", shape=array.shape)
        except OSError as error:
            self._error = error
            return np.empty(0, array.dtype)

    def check(self) -> None:
        """Raise the first failed write's error, if any."""
        if self._error is not None:
            raise self._error

    def __enter__(self) -> "ArraySpill":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._count, self._error = 0, None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


logger = logging.getLogger("keras_strategy")

_FACTS = "facts.json"
_NAME = re.compile(r"backup-(\d{9})\.npz")
# What is being written, by a process that may have been killed at it.
_PART = re.compile(r"\.backup-\d{9}\.npz\.part")
_DAMAGED = ".damaged"
# So many files are kept.
_KEPT = 2
# What Keras's own callback leaves in its folder.
_OF_KERAS = ("latest.weights.h5", "training_metadata.json")


class _Damaged(Exception):
    """A file whose content is not what was written."""


@dataclass(frozen=True)
class BackupContents:
    """Content of a backup: JSON values, arrays by name, and the file."""

    facts: dict[str, Any]
    arrays: dict[str, np.ndarray]
    file: pathlib.Path


class BackupFolder:
    """Folder of the backups of one `fit`."""

    def __init__(self, path: str | os.PathLike):
        self._path = pathlib.Path(path)
        self._aside = ArraySpill.next_to(self._path / "backup")

    def spill(self, array: np.ndarray) -> np.ndarray:
        """Return an array for the next backup, spilled to disk if it is large."""
        return self._aside.add(array)

    def read(self) -> BackupContents | None:
        """Return the last intact backup, or None; rename damaged ones.

        Raises:
            ValueError: If all backups are damaged, or another program wrote them.
        """
        self._clear(_PART)
        files = self._files()
        for file in reversed(files):
            try:
                return _read(file)
            except _Damaged as error:
                aside = file.with_name(file.name + _DAMAGED)
                os.replace(file, aside)
                logger.error(
                    "The backup %s is damaged (%s) and kept as %s. The one before it "
                    "is used.",
                    *(file, error, aside.name),
                )
        found = self._named()
        if any(name.endswith(_DAMAGED) for name in found):
            raise ValueError(
                f"All backups in {self._path} are damaged. Remove the folder to train "
                "from the beginning."
            )
        of_keras = [name for name in _OF_KERAS if name in found]
        if of_keras:
            raise ValueError(
                f"{self._path} holds a backup that Keras alone has made "
                f"({', '.join(of_keras)}), which says too little to go on exactly. "
                "Remove it to train from the beginning, or name another folder."
            )
        return None

    def write(self, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Write a backup of JSON values and arrays; remove old ones."""
        with self._aside:
            self._aside.check()
            self._write_next(facts, arrays)

    def _write_next(self, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        files = self._files()
        number = 1 + (_number(files[-1]) if files else 0)
        target = self._path / f"backup-{number:09}.npz"
        part = self._path / f".{target.name}.part"
        try:
            with part.open("wb") as file:
                _write(file, facts, arrays)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
        _sync_folder(self._path)
        for old in files[: len(files) + 1 - _KEPT]:
            old.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove the backups, and the folder if it is empty."""
        self._clear(_PART)
        self._clear(_NAME)
        with contextlib.suppress(OSError):
            self._path.rmdir()

    def _clear(self, pattern: re.Pattern) -> None:
        for name in self._named():
            if pattern.fullmatch(name):
                (self._path / name).unlink(missing_ok=True)

    def _files(self) -> list[pathlib.Path]:
        return [self._path / n for n in sorted(self._named()) if _NAME.fullmatch(n)]

    def _named(self) -> list[str]:
        return os.listdir(self._path) if self._path.is_dir() else []


def _number(file: pathlib.Path) -> int:
    match = _NAME.fullmatch(file.name)
    assert match is not None
    return int(match.group(1))


def _write(file: Any, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    dtypes = {name: str(array.dtype) for name, array in arrays.items()}
    text = json.dumps({"facts": facts, "dtypes": dtypes}).encode()
    plain = {name: _as_plain(array) for name, array in arrays.items()}
    plain[_FACTS] = np.frombuffer(text, np.uint8)
    np.savez(file, allow_pickle=False, **plain)


def _read(file: pathlib.Path) -> BackupContents:
    with file.open("rb") as opened:
        try:
            with np.load(opened, allow_pickle=False) as archive:
                held = json.loads(archive[_FACTS].tobytes())
                plain = {name: archive[name] for name in held["dtypes"]}
        except MemoryError:
            raise
        except Exception as error:
            # One spoiled bit may ask for a password or for a way to compress that
            # nobody knows. But a disk that cannot be read may be read another time.
            if isinstance(error, OSError) and error.errno != errno.EINVAL:
                raise
            raise _Damaged(f"{type(error).__name__}: {error}") from error
    arrays = {n: array.view(_dtype(held["dtypes"][n])) for n, array in plain.items()}
    return BackupContents(held["facts"], arrays, file)


def _as_plain(array: np.ndarray) -> np.ndarray:
    """Return an array in a dtype that NumPy knows without extensions."""
    if array.dtype.isbuiltin == 1:
        return array
    return array.view(f"uint{8 * array.dtype.itemsize}")


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def _sync_folder(path: pathlib.Path) -> None:
    """Sync a folder's entries to disk, where the system can."""
    with contextlib.suppress(OSError):
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
