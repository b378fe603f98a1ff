"""Translation of a program's names from tf.distribute to this package.

Names are looked up in the package itself, so the notes report what would happen.
"""

import argparse
import ast
import difflib
import itertools
import sys
import types
import warnings
from typing import NamedTuple

import keras_strategy
from keras_strategy.core.registry import REASONS

_ALIAS = "ks"
# Functions of TensorFlow outside of tf.distribute that belong to it.
_OUTSIDE = [
    "nn.compute_average_loss",
    "nn.scale_regularization_loss",
    *(f"tpu.experimental.{name}" for name in keras_strategy.tpu.experimental.__all__),
]
# Names that work on TensorFlow only, and their replacements on every backend.
_BY_HAND = {
    "GradientTape": "use `ks.value_and_grad`",
    "Variable": "use `keras.Variable`",
    "VariableAggregation": "`keras.Variable` takes a string, as aggregation='sum'",
    "VariableSynchronization": (
        "`keras.Variable` takes a string, as synchronization='on_read'"
    ),
    "function": "leave it out: `strategy.run` compiles",
    "train.Checkpoint": "use `model.save` and `keras.callbacks.BackupAndRestore`",
    "train.CheckpointManager": "use `keras.callbacks.BackupAndRestore`",
    "saved_model.save": "use `model.save` and `model.export`",
    "config.set_logical_device_configuration": "use `ks.config.set_logical_devices`",
}
_NOTES = {
    "TPUStrategy": "It exists on JAX only; the other backends raise an error.",
    "coordinator.ClusterCoordinator": (
        "On JAX and torch it needs no servers: it starts workers, or uses a Dask "
        "cluster; a function returns the values to assign."
    ),
}
_V1_NOTE = (
    "tf.compat.v1.distribute is TensorFlow 1's, and is not changed. Port the program "
    "to tf.distribute first."
)
_TENSORFLOW_ONLY = "It exists on TensorFlow only; JAX and torch raise an error: {}"


class Ported(NamedTuple):
    """Translated program, and what to change by hand or to know, each with its line."""

    text: str
    notes: tuple[str, ...]


def main(options: argparse.Namespace) -> int:
    try:
        with open(options.file, encoding="utf-8", newline="") as file:
            source = file.read()
        ported = port(source)
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        message = f"{options.file!r} cannot be read as a Python program: {error}"
        print(message, file=sys.stderr)
        return 1
    texts = source.splitlines(keepends=True), ported.text.splitlines(keepends=True)
    for line in difflib.unified_diff(*texts, options.file, f"{options.file} (ported)"):
        print(line, end="" if line.endswith("\n") else "\n")
    if ported.text == source:
        print("No name of tf.distribute changes.", file=sys.stderr)
    for note in ported.notes:
        print(note, file=sys.stderr)
    return 0


def port(source: str) -> Ported:
    """Replace tf.distribute's names in a program, or raise SyntaxError."""
    return _Program(source).ported()


def look_up_name(path: list[str]) -> tuple[bool, str]:
    """Return True if this package has a name, given by its parts, and a note or ""."""
    value, found = keras_strategy, []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for part in path:
            if not isinstance(value, types.ModuleType | type):
                break
            try:
                value = getattr(value, part)
            except AttributeError as error:
                return False, str(error)
            found.append(part)
    notes = [str(w.message) for w in caught if w.category is DeprecationWarning]
    name = ".".join(found).removeprefix("experimental.") + "."
    reasons = {key: _TENSORFLOW_ONLY.format(text) for key, text in REASONS.items()}
    for key, reason in {**reasons, **_NOTES}.items():
        if name.startswith(key.removeprefix("experimental.") + "."):
            notes.append(reason)
            break
    return True, " ".join(notes)


def _without_v2(path: list[str]) -> list[str]:
    return path[2:] if path[:2] == ["compat", "v2"] else path


class _Program(ast.NodeVisitor):
    def __init__(self, source: str):
        tree, self._bytes = ast.parse(source), source.encode()
        lines = source.splitlines(keepends=True)
        sizes = (len(line.encode()) for line in lines)
        self._line_starts = [0, *itertools.accumulate(sizes)]
        # Replacements of ranges of bytes: begin, end and new text.
        self._changes: list[tuple[int, int, str]] = []
        self._notes: list[tuple[int, str]] = []
        # The path in TensorFlow that each name of the program is bound to.
        self._bindings: dict[str, list[str]] = {}
        self._tf_imports: list[ast.Import | ast.ImportFrom] = []
        # Uses of TensorFlow that remain.
        self._num_uses = 0
        # The name under which the program imports this package already.
        self._imported_as = ""
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                self._translate_import_from(node)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    self._record_import(node, alias)
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        default = _ALIAS if _ALIAS not in used else keras_strategy.__name__
        self._package_name = self._imported_as or default
        self.visit(tree)

    def _record_import(self, node: ast.Import, alias: ast.alias) -> None:
        parts = alias.name.split(".")
        if parts[0] == "tensorflow":
            # `import tensorflow.distribute` binds `tensorflow`.
            bound = alias.asname or parts[0]
            self._bindings[bound] = _without_v2(parts[1:]) if alias.asname else []
            self._tf_imports.append(node)
        elif alias.name == keras_strategy.__name__ and not self._imported_as:
            self._imported_as = alias.asname or alias.name

    def _translate_import_from(self, node: ast.ImportFrom) -> None:
        package, *inside = (node.module or "").split(".")
        if package != "tensorflow":
            return
        if inside[:1] != ["distribute"]:
            for alias in node.names:
                if _without_v2([*inside, alias.name]) == ["distribute"]:
                    self._bindings[alias.asname or alias.name] = ["distribute"]
                    self._tf_imports.append(node)
            return
        for alias in node.names:
            if not self._exists([*inside[1:], alias.name], node.lineno):
                return
        begin, end = self._span(node)
        new = ".".join([keras_strategy.__name__, *inside[1:]])
        text = self._bytes[begin:end].decode().replace(node.module or "", new, 1)
        self._changes.append((begin, end, text))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        links: list[ast.Attribute] = []
        root: ast.expr = node
        while isinstance(root, ast.Attribute):
            links.insert(0, root)
            root = root.value
        if not isinstance(root, ast.Name) or root.id not in self._bindings:
            self.generic_visit(node)
            return
        path = [*self._bindings[root.id], *(link.attr for link in links)]
        num_bound = len(self._bindings[root.id])
        self._num_uses += 1
        if path[:3] == ["compat", "v1", "distribute"]:
            self._notes.append((node.lineno, _V1_NOTE))
        if not num_bound:
            v2_path = _without_v2(path)
            path, links = v2_path, links[len(path) - len(v2_path) :]
        if path[:1] == ["distribute"]:
            if self._exists(path[1:], node.lineno):
                self._replace(root if num_bound else links[0], self._package_name)
            return
        for old in _OUTSIDE:
            parts = old.split(".")
            if path[: len(parts)] == parts and len(parts) > num_bound:
                last = links[len(parts) - num_bound - 1]
                new = f"{self._package_name}.{old.removeprefix('nn.')}"
                self._replace(last, new)
                return
        for old, instead in _BY_HAND.items():
            if ".".join(path[: old.count(".") + 1]) == old:
                note = f"tf.{old}: On JAX and torch, {instead}."
                self._notes.append((node.lineno, note))

    def _replace(self, node: ast.expr, text: str) -> None:
        self._num_uses -= 1
        self._changes.append((*self._span(node), text))

    def _exists(self, path: list[str], line: int) -> bool:
        exists, note = look_up_name(path)
        if note:
            self._notes.append((line, f"tf.distribute.{'.'.join(path)}: {note}"))
        return exists

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return (
            self._line_starts[node.lineno - 1] + node.col_offset,
            self._line_starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def ported(self) -> Ported:
        changes = self._changes
        if any(text.startswith(self._package_name) for _, _, text in changes):
            changes = [*changes, *self._package_imports()]
        program = self._bytes
        for begin, end, text in sorted(changes, key=lambda c: c[0], reverse=True):
            program = program[:begin] + text.encode() + program[end:]
        notes = tuple(f"line {line}: {note}" for line, note in sorted(self._notes))
        return Ported(program.decode(), notes)

    def _package_imports(self) -> list[tuple[int, int, str]]:
        """Return imports of this package: in place of TensorFlow's, or after it."""
        if self._imported_as or not self._tf_imports:
            return []
        statement = f"import {keras_strategy.__name__}"
        if self._package_name != keras_strategy.__name__:
            statement += f" as {self._package_name}"
        nodes = sorted(self._tf_imports, key=lambda node: node.lineno)
        if len(nodes) == len(nodes[0].names) == 1 and not self._num_uses:
            return [(*self._span(nodes[0]), statement)]
        # An import in a function binds the name in that function only.
        nodes = [node for node in nodes if node.col_offset == 0][:1] or nodes
        ends = [(self._span(node)[1], node.col_offset) for node in nodes]
        return [(end, end, f"\n{' ' * indent}{statement}") for end, indent in ends]
