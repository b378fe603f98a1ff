"""Which names of a program change from tf.distribute to this package.

A name is asked of the package itself, so that what is said of it is what would happen.
"""

import ast
import difflib
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import keras_strategy
from keras_strategy.core.unsupported_names import REASONS

_NAME = "ks"
# Functions of TensorFlow outside of tf.distribute that belong to it.
_BESIDE = {
    "nn.compute_average_loss": "compute_average_loss",
    "nn.scale_regularization_loss": "scale_regularization_loss",
    **{
        f"tpu.experimental.{name}": f"tpu.experimental.{name}"
        for name in keras_strategy.tpu.experimental.__all__
    },
}
# Functions of TensorFlow that run on TensorFlow alone, and what does on each backend.
_BY_HAND = {
    "GradientTape": "`ks.value_and_grad` stands for it",
    "Variable": "`keras.Variable` stands for it",
    "VariableAggregation": "`keras.Variable` takes a word, as aggregation='sum'",
    "VariableSynchronization": (
        "`keras.Variable` takes a word, as synchronization='on_read'"
    ),
    "function": "leave it out: `strategy.run` compiles",
    "train.Checkpoint": "`model.save` and `keras.callbacks.BackupAndRestore` do",
    "train.CheckpointManager": "`keras.callbacks.BackupAndRestore` does",
    "saved_model.save": "`model.save` and `model.export` do",
    "config.set_logical_device_configuration": "`ks.config.set_logical_devices` does",
}
_NOTES = {
    "TPUStrategy": "JAX alone has it, and the other backends raise an error.",
    "coordinator.ClusterCoordinator": (
        "On JAX and torch it needs no servers: it starts workers, or is given a "
        "cluster of Dask's; a function returns what is to be assigned."
    ),
}
_OLD = ["compat", "v1"]
_OF_OLD = (
    "tf.compat.v1.distribute is TensorFlow 1's, and stays. Write the program for "
    "tf.distribute first."
)
_ELSEWHERE = (
    "TensorFlow alone has an engine for it, and JAX and torch raise an error: {}"
)


@dataclass(frozen=True)
class Ported:
    """What becomes of a program.

    Attributes:
        text: The program with this package's names.
        notes: What is to be done by hand or known, each with the line that it is about.
    """

    text: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Change:
    """A part of a program's text that is replaced, in characters."""

    begin: int
    end: int
    text: str


def port(source: str) -> Ported:
    """Replaces tf.distribute's names in a program by this package's.

    Args:
        source: The program.

    Returns:
        The program, changed, and what could not be.

    Raises:
        SyntaxError: If it is no program of Python's.
    """
    program = _Program(source)
    for node in ast.walk(program.tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            program.import_from(node)
    program.visit(program.tree)
    return program.ported()


def diff(source: str, ported: Ported, name: str) -> str:
    """What changes, in the format of `diff -u`.

    Args:
        source: The program as it is.
        ported: What becomes of it.
        name: The file's name.
    """
    lines = difflib.unified_diff(
        source.splitlines(keepends=True),
        ported.text.splitlines(keepends=True),
        name,
        f"{name} (ported)",
    )
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)


def look_up_name(path: list[str]) -> tuple[bool, str]:
    """What the package has under a name of tf.distribute.

    Args:
        path: The name's parts, as ["experimental", "CentralStorageStrategy"].

    Returns:
        Whether it is there, and a note, which may be empty.
    """
    found, known = keras_strategy, []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for part in path:
            if not isinstance(found, types.ModuleType | type):
                break
            try:
                found = getattr(found, part)
            except AttributeError as error:
                return False, str(error)
            known.append(part)
    notes = [str(w.message) for w in warned if w.category is DeprecationWarning]
    name = ".".join(known).removeprefix("experimental.") + "."
    said = {key: _ELSEWHERE.format(reason) for key, reason in REASONS.items()}
    for key, reason in {**said, **_NOTES}.items():
        if name.startswith(key.removeprefix("experimental.") + "."):
            notes.append(reason)
            break
    return True, " ".join(notes)


def _of_tensorflow_2(path: list[str]) -> list[str]:
    """A name's parts without those that stand for TensorFlow 2 itself."""
    return path[2:] if path[:2] == ["compat", "v2"] else path


class _Program(ast.NodeVisitor):
    """A program that is gone through."""

    def __init__(self, source: str):
        self.source, self.tree = source, ast.parse(source)
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line.encode()))
        self._bytes = source.encode()
        self._changes: list[_Change] = []
        self._notes: list[tuple[int, str]] = []
        # What each name of the program stands for in TensorFlow, "" for all of it.
        self._of: dict[str, list[str]] = {}
        self._imports: list[ast.Import | ast.ImportFrom] = []
        self._uses = 0
        nodes = list(ast.walk(self.tree))
        for node in nodes:
            if isinstance(node, ast.Import):
                self._import(node)
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        self._own = self._imported() or (
            _NAME if _NAME not in used else keras_strategy.__name__
        )
        self._is_imported = self._imported() is not None

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            parts = alias.name.split(".")
            if parts[0] != "tensorflow":
                continue
            # `import tensorflow.distribute` binds `tensorflow`.
            bound = alias.asname or parts[0]
            self._of[bound] = _of_tensorflow_2(parts[1:]) if alias.asname else []
            self._imports.append(node)

    def _imported(self) -> str | None:
        """Under which name the program has imported this package already."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name == keras_strategy.__name__:
                        return alias.asname or alias.name
        return None

    def import_from(self, node: ast.ImportFrom) -> None:
        """Notes, or changes, what is imported from TensorFlow."""
        parts = (node.module or "").split(".")
        if parts[0] != "tensorflow":
            return
        inside = parts[1:]
        if inside[:1] != ["distribute"]:
            for alias in node.names:
                if _of_tensorflow_2([*inside, alias.name]) == ["distribute"]:
                    bound = alias.asname or alias.name
                    self._of[bound] = ["distribute"]
                    self._imports.append(node)
            return
        for alias in node.names:
            if not self._is_there([*inside[1:], alias.name], node.lineno):
                return
        begin, end = self._span(node)
        text = self._bytes[begin:end].decode()
        new = ".".join([keras_strategy.__name__, *inside[1:]])
        self._changes.append(
            _Change(begin, end, text.replace(node.module or "", new, 1))
        )

    def visit_Attribute(self, node: ast.Attribute) -> None:
        links: list[ast.Attribute] = []
        at: ast.expr = node
        while isinstance(at, ast.Attribute):
            links.insert(0, at)
            at = at.value
        if not isinstance(at, ast.Name) or at.id not in self._of:
            self.generic_visit(node)
            return
        path = [*self._of[at.id], *(link.attr for link in links)]
        before = len(self._of[at.id])
        self._uses += 1
        if path[:3] == [*_OLD, "distribute"]:
            self._notes.append((node.lineno, _OF_OLD))
        if not before:
            of_2 = _of_tensorflow_2(path)
            path, links = of_2, links[len(path) - len(of_2) :]
        if path[:1] == ["distribute"]:
            if self._is_there(path[1:], node.lineno):
                self._replace(at if before else links[0], self._own)
            return
        for known, new in _BESIDE.items():
            parts = known.split(".")
            if path[: len(parts)] == parts and len(parts) > before:
                self._replace(links[len(parts) - before - 1], f"{self._own}.{new}")
                return
        for known, instead in _BY_HAND.items():
            if ".".join(path[: known.count(".") + 1]) == known:
                note = f"tf.{known}: On JAX and torch, {instead}."
                self._notes.append((node.lineno, note))

    def _replace(self, node: ast.expr, text: str) -> None:
        self._uses -= 1
        self._changes.append(_Change(*self._span(node), text))

    def _is_there(self, path: list[str], line: int) -> bool:
        there, note = look_up_name(path)
        if note:
            self._notes.append((line, f"tf.distribute.{'.'.join(path)}: {note}"))
        return there

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def ported(self) -> Ported:
        """The program, changed."""
        changes = list(self._changes)
        if any(change.text.startswith(self._own) for change in changes):
            changes += self._import_of_own()
        text = self._bytes
        for change in sorted(changes, key=lambda c: c.begin, reverse=True):
            text = text[: change.begin] + change.text.encode() + text[change.end :]
        notes = tuple(f"line {line}: {note}" for line, note in sorted(self._notes))
        return Ported(text.decode(), notes)

    def _import_of_own(self) -> Iterator[_Change]:
        """Imports this package: beside TensorFlow, or in its place."""
        if self._is_imported or not self._imports:
            return
        first = min(self._imports, key=lambda node: node.lineno)
        own = f"import {keras_strategy.__name__}"
        if self._own != keras_strategy.__name__:
            own += f" as {self._own}"
        begin, end = self._span(first)
        if len(self._imports) == len(first.names) == 1 and not self._uses:
            yield _Change(begin, end, own)
            return
        # What is imported in a function is known there alone.
        of_all = [node for node in self._imports if node.col_offset == 0]
        places = (
            [min(of_all, key=lambda node: node.lineno)] if of_all else self._imports
        )
        for node in places:
            _, end = self._span(node)
            yield _Change(end, end, f"\n{' ' * node.col_offset}{own}")
