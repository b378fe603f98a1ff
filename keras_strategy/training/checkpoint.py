"""Checkpoint files, written atomically and verified when read.

A file is a NumPy archive of arrays and a JSON text. It is written to a temporary name,
synced and renamed, so that a killed process leaves the previous file intact. The last
ones are kept: if the checksums of one fail, the one before it is used. An archive needs
no other package on any backend, has a checksum of each array, and gives one array at a
time.

Each worker writes the shards of its replicas. No process has a sharded array as a whole
until one is read.
"""

import contextlib
import errno
import functools
import json
import os
import pathlib
import re
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import ml_dtypes  # a dependency of Keras
import numpy as np

from keras_strategy.cluster.membership import Cluster
from keras_strategy.errors import logger
from keras_strategy.training.saving import raise_if_any_failed, run_on_chief

_FACTS = "facts.json"
_ANY = re.compile(".*")
_BACKUP = re.compile(r"backup-\d{9}\.npz")
_SHARDS = re.compile(r"backup-\d{9}\.worker-\d+\.npz")
_PARTIAL = re.compile(r"\.+backup-.*\.part")
_NUMBER = re.compile(r"backup-(\d{9})\.")
_DAMAGED = ".damaged"
_POLL_SECONDS = 0.05
# How long a worker's file may take to appear on the chief's machine.
_VISIBLE_SECONDS = 30.0
# How long the chief waits for other workers' files when training has failed.
_CLOSE_SECONDS = 2.0
_NOT_SHARED = (
    "The variables are sharded, so each worker writes a file into {folder}. Expected a "
    "folder that all workers share, such as one on a network file system, but files of "
    "other workers are not there."
)
# Files of Keras's own BackupAndRestore.
_KERAS_FILES = ("latest.weights.h5", "training_metadata.json")


@dataclass(frozen=True)
class Shard:
    """Part of an array that is sharded over the replicas."""

    name: str  # of the array
    shape: tuple[int, ...]  # of the whole array
    # Where the part begins: in each dimension, or in the flattened array.
    begin: tuple[int, ...] | int
    values: np.ndarray

    def copy_to(self, array: np.ndarray) -> None:
        if isinstance(self.begin, int):
            end = self.begin + self.values.size
            array.reshape(-1)[self.begin : end] = self.values.reshape(-1)
        else:
            sizes = zip(self.begin, self.values.shape, strict=True)
            array[tuple(slice(begin, begin + size) for begin, size in sizes)] = (
                self.values
            )


class SavedArrays(Mapping[str, np.ndarray]):
    """Arrays of a backup's files, each read and joined when it is looked up."""

    def __init__(self, files: Sequence[pathlib.Path]):
        # By the name of an array: its members in the archives.
        self._members: dict[str, list[tuple[Any, str, str, list[Any]]]] = {}
        self.facts: dict[str, Any] = {}
        for file in files:
            archive = np.load(file, allow_pickle=False)
            metadata = json.loads(archive[_FACTS].tobytes())
            self.facts = self.facts or metadata["facts"]
            for member, (dtype, *shard) in metadata["members"].items():
                if member not in archive.files:
                    raise ValueError(f"{file} lacks {member}")
                name = shard[0] if shard else member
                self._members.setdefault(name, []).append(
                    (archive, member, dtype, shard)
                )

    def __getitem__(self, name: str) -> np.ndarray:
        joined = None
        for archive, member, dtype, shard in self._members[name]:
            values = archive[member].view(getattr(ml_dtypes, dtype, dtype))
            if not shard:
                return values
            _, shape, begin = shard
            if joined is None:
                joined = np.empty(shape, values.dtype)
            begin = tuple(begin) if isinstance(begin, list) else begin
            Shard(name, shape, begin, values).copy_to(joined)
        assert joined is not None
        return joined

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)


@dataclass(frozen=True)
class BackupContents:
    facts: dict[str, Any]  # JSON values
    arrays: Mapping[str, np.ndarray]
    file: pathlib.Path
    is_sharded: bool = False  # so that every worker has the arrays


class _Write(NamedTuple):
    """A backup that is written while training goes on."""

    written: Future | None  # this worker's file
    committed: Future | None  # on the chief, when all files are there


class BackupFolder:
    """A folder of numbered backups, each of one file and others with shards."""

    # The chief's file gets its name when all others are there, so a killed worker
    # leaves the previous backup intact.

    def __init__(self, path: str | os.PathLike, max_to_keep: int = 2):
        if type(max_to_keep) is not int or max_to_keep < 1:
            raise ValueError(
                "Argument `max_to_keep` must be a number of checkpoints, 1 or more. "
                f"Received: max_to_keep={max_to_keep!r}"
            )
        self._path, self._max_to_keep = pathlib.Path(path), max_to_keep
        self._pending: _Write | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._stop = threading.Event()

    # --- reads

    def read(self, cluster: Cluster | None = None) -> BackupContents | None:
        """Return the last intact backup, or None; all workers call it."""
        # Other workers than the chief get arrays only if these are sharded.
        while True:
            file = run_on_chief(cluster, "reading the backup", self._find)
            facts = None
            if file is not None:
                facts = [os.fspath(file), SavedArrays([file]).facts]
            if cluster is not None:
                facts = cluster.exchange("the backup to resume from", facts)[0]
            if facts is None:
                return None
            file, facts = pathlib.Path(facts[0]), facts[1]
            others = _shard_files(file, facts)
            if not others:
                is_reader = cluster is None or cluster.is_chief
                arrays = SavedArrays([file]) if is_reader else {}
                return BackupContents(facts, arrays, file)
            damage = self._check_shards(others, cluster)
            if damage is None:
                arrays = SavedArrays([file, *others])
                return BackupContents(facts, arrays, file, is_sharded=True)
            move = functools.partial(_move_aside, file, damage)
            run_on_chief(cluster, "reading the backup", move)

    def _find(self) -> pathlib.Path | None:
        """Return the last backup whose main file is intact; rename damaged ones."""
        self._remove(_PARTIAL)
        for file in reversed(self._files(_BACKUP)):
            damage = _damage_of(file)
            if damage is None:
                return file
            _move_aside(file, damage)
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

    def _check_shards(
        self, files: Sequence[pathlib.Path], cluster: Cluster | None
    ) -> str | None:
        """Return the damage to a backup's shards; each worker reads some of them."""
        rank, size = (0, 1) if cluster is None else (cluster.rank, cluster.size)
        error, damage = None, None
        missing = [file.name for file in files if not file.exists()]
        try:
            if not missing:
                found = map(_damage_of, files[rank::size])
                damage = next(filter(None, found), None)
        except OSError as caught:
            error = caught
        reports = [[damage, missing]]
        if cluster is not None:
            raise_if_any_failed(cluster, "reading the backup", error)
            reports = cluster.exchange("the check of the backup", reports[0])
        elif error is not None:
            raise error
        if reports[0][1]:
            return f"there is no {', '.join(reports[0][1])}"
        if any(missing for _, missing in reports):
            raise FileNotFoundError(_NOT_SHARED.format(folder=self._path))
        return next(filter(None, [damage for damage, _ in reports]), None)

    # --- writes

    def save(
        self,
        cluster: Cluster | None,
        facts: dict[str, Any],
        arrays: dict[str, np.ndarray],
        shards: Sequence[Shard],
        is_sharded: bool,
        asynchronous: bool = False,
    ) -> None:
        """Write a backup and remove old ones; all workers call it."""
        # The chief's `facts` and `arrays` are written, and each worker's `shards`. If
        # asynchronous, it returns at once, and the next save or `wait` raises the error
        # of a failed write. `arrays` and `shards` must not change until then.
        self.wait(cluster)
        is_chief = cluster is None or cluster.is_chief
        number = None
        if cluster is not None and is_sharded:
            number = self._next_number() if is_chief else None
            number = cluster.exchange("the number of the backup", number)[0]
            facts = facts | {"shard_files": cluster.size}
        elif is_chief:
            number = self._next_number()
        if number is None:  # nothing to write here
            if asynchronous:
                self._pending = _Write(None, None)
            else:
                run_on_chief(cluster, "the backup", lambda: None)
            return
        file = self._path / f"backup-{number:09}.npz"
        target, part = file, file.with_name(f".{file.name}.part")
        if not is_chief:
            target = part = _shard_file(file, cast("Cluster", cluster).rank)
            facts = {}
        others = _shard_files(file, facts) if is_chief else []
        write = functools.partial(_write_file, part, facts, arrays, shards)
        commit = functools.partial(self._commit, part, target, others)
        self._stop.clear()
        if not asynchronous and is_chief and not others:
            run_on_chief(cluster, "the backup", lambda: [write(), commit()])
            return
        self._executor = self._executor or ThreadPoolExecutor(1, "backup")
        written = self._executor.submit(write)
        committed = self._executor.submit(commit) if is_chief else None
        self._pending = _Write(written, committed)
        if not asynchronous:
            self.wait(cluster)

    def wait(self, cluster: Cluster | None) -> None:
        """Wait until the last backup is complete; all workers call it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            error = pending.written and pending.written.exception()
            if cluster is not None:
                raise_if_any_failed(cluster, "the backup", cast("Any", error))
            elif error is not None:
                raise error
        except BaseException:
            self._stop.set()
            raise
        commit = pending.committed
        with self._wait_limit(_VISIBLE_SECONDS):
            run_on_chief(cluster, "the backup", lambda: commit and commit.result())

    @contextlib.contextmanager
    def _wait_limit(self, seconds: float) -> Iterator[None]:
        """Limit how long the chief waits for other workers' files."""
        timer = threading.Timer(seconds, self._stop.set)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the thread that writes, after what it is writing."""
        if self._executor is not None:
            with self._wait_limit(_CLOSE_SECONDS):
                self._executor.shutdown()
            self._executor = None

    def clear(self) -> None:
        """Remove the backups, and the folder if it is empty then."""
        for pattern in _PARTIAL, _BACKUP, _SHARDS:
            self._remove(pattern)
        with contextlib.suppress(OSError):
            self._path.rmdir()

    def _next_number(self) -> int:
        # Also not that of shards which a killed worker has left.
        found = map(_NUMBER.search, [file.name for file in self._files()])
        return max([int(match[1]) for match in found if match], default=0) + 1

    def _commit(
        self, part: pathlib.Path, file: pathlib.Path, others: list[pathlib.Path]
    ) -> None:
        """Name the chief's file, when the others are there; remove old backups."""
        while not all(other.exists() for other in others):
            if self._stop.wait(_POLL_SECONDS):
                if all(other.exists() for other in others):
                    break
                part.unlink(missing_ok=True)
                raise FileNotFoundError(_NOT_SHARED.format(folder=self._path))
        os.replace(part, file)
        _sync_folder(self._path)
        files = self._files(_BACKUP)
        kept = {other.name for other in files[-self._max_to_keep :]}
        for old in files[: -self._max_to_keep]:
            old.unlink(missing_ok=True)
        for shard in self._files(_SHARDS):
            main = _NUMBER.search(shard.name)
            if main and f"backup-{main[1]}.npz" not in kept:
                shard.unlink(missing_ok=True)

    def _remove(self, pattern: re.Pattern) -> None:
        for file in self._files(pattern):
            file.unlink(missing_ok=True)

    def _files(self, pattern: re.Pattern = _ANY) -> list[pathlib.Path]:
        names = os.listdir(self._path) if self._path.is_dir() else []
        return [self._path / name for name in sorted(names) if pattern.fullmatch(name)]


def _shard_files(file: pathlib.Path, facts: Mapping[str, Any]) -> list[pathlib.Path]:
    """Return the files of other workers that belong to the chief's."""
    return [_shard_file(file, rank) for rank in range(1, facts.get("shard_files", 1))]


def _shard_file(file: pathlib.Path, rank: int) -> pathlib.Path:
    return file.with_name(f"{file.stem}.worker-{rank}.npz")


def _damage_of(file: pathlib.Path) -> str | None:
    """Return what is wrong with a file, by its checksums; None if it is intact."""
    try:
        SavedArrays([file])
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
        return None if damaged is None else f"the checksum of {damaged} differs"
    except Exception as error:
        # A flipped bit may cause any error, such as an unknown compression method. But
        # an unreadable disk may become readable again.
        is_disk = isinstance(error, OSError) and error.errno != errno.EINVAL
        if is_disk or isinstance(error, MemoryError):
            raise
        return f"{type(error).__name__}: {error}"


def _move_aside(file: pathlib.Path, damage: str) -> None:
    renamed = file.with_name(file.name + _DAMAGED)
    os.replace(file, renamed)
    logger.error(
        "The backup %s is damaged (%s) and was renamed to %s. The one before it is "
        "used.",
        *(file, damage, renamed.name),
    )


def _write_file(
    file: pathlib.Path,
    facts: dict[str, Any],
    arrays: Mapping[str, np.ndarray],
    shards: Sequence[Shard],
) -> None:
    """Write an archive, which gets its name when it is on the disk."""
    plain: dict[str, np.ndarray] = {}
    members: dict[str, list[Any]] = {}
    for name, array in arrays.items():
        plain[name], members[name] = array, [str(array.dtype)]
    for number, shard in enumerate(shards):
        member = f"shards/{number}"
        place = [shard.name, list(shard.shape), shard.begin]
        plain[member], members[member] = shard.values, [str(shard.values.dtype), *place]
    for name, array in plain.items():
        if array.dtype.isbuiltin != 1:  # NumPy knows the dtype by an extension only
            plain[name] = array.view(f"uint{8 * array.dtype.itemsize}")
    text = json.dumps({"facts": facts, "members": members}).encode()
    plain[_FACTS] = np.frombuffer(text, np.uint8)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.part")
    try:
        with part.open("wb") as opened:
            np.savez(opened, allow_pickle=False, **plain)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def _sync_folder(path: pathlib.Path) -> None:
    with contextlib.suppress(OSError):  # some systems cannot sync a folder
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
