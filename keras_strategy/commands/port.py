"""Translation of a program's names from tf.distribute to this package.

Names are looked up in the sources of this package and of Keras. Neither Keras nor a
backend is imported, which takes seconds.
"""

import argparse
import ast
import difflib
import functools
import importlib.util
import itertools
import pathlib
import re
import sys
from typing import NamedTuple

import keras_strategy
from keras_strategy.errors import TENSORFLOW_ONLY

_ALIAS = "ks"
# Names of TensorFlow that need more than another module, and what to do instead.
_TABLE = pathlib.Path(__file__).with_name("tensorflow_names.tsv")
_INSTEAD = dict(line.split("\t") for line in _TABLE.read_text("utf-8").splitlines())
_DTYPE = re.compile(r"bool|string|(bfloat|complex|float|u?int)\d+")
_DEPRECATED = "It is deprecated: use `ks.experimental.{}`."
_NOTES = {
    "TPUStrategy": "It exists on JAX only; the other backends raise an error.",
    "CollectiveCommunication": _DEPRECATED.format("CommunicationImplementation"),
    "CollectiveHints": _DEPRECATED.format("CommunicationOptions"),
    "coordinator.ClusterCoordinator": (
        "On JAX and torch it needs no servers: it starts workers, or uses a Dask "
        "cluster; a function returns the values to assign."
    ),
}
_ELSEWHERE = "It exists on TensorFlow only; JAX and torch raise an error: {}"


class Ported(NamedTuple):
    """Translated program, and what to change by hand or to know, with the lines."""

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
    package = keras_strategy.__name__
    if not _has_name(package, path):
        return False, f"{package} has no `{'.'.join(path)}`."
    name = ".".join(path).removeprefix("experimental.") + "."
    reasons = {key: _ELSEWHERE.format(text) for key, text in TENSORFLOW_ONLY.items()}
    for key, reason in {**reasons, **_NOTES}.items():
        if name.startswith(key.removeprefix("experimental.") + "."):
            return True, reason
    return True, ""


def _has_name(module: str, path: list[str]) -> bool:
    for part in path:
        names = _public_names(module)
        if names is None:
            return True  # a member of a class
        if part not in names:
            return False
        module += f".{part}"
    return True


@functools.cache
def _public_names(module: str) -> list[str] | None:
    """Return the names that a module exports, None if there is no such module."""
    package, *parts = module.split(".")
    # It finds a package without importing it.
    spec = importlib.util.find_spec(package)
    path = pathlib.Path(str(spec and spec.origin)).parent.joinpath(*parts)
    for file in path / "__init__.pyi", path / "__init__.py", path.with_suffix(".py"):
        if file.is_file():
            text = file.read_text(encoding="utf-8")
            listed = re.search(r"^__all__ = (\[.*?\])", text, re.DOTALL | re.MULTILINE)
            imported = re.findall(r" as (\w+)", text)
            return ast.literal_eval(listed[1]) if listed else imported
    return None


def _replacement(path: list[str]) -> tuple[str, str]:
    """Return a name of TensorFlow that remains, and what to do on JAX and torch."""
    name = ".".join(path)
    begins = range(1 + (path[0] in ("math", "nn", "linalg", "signal")))
    for begin, end in itertools.product(begins, range(len(path), 0, -1)):
        if (known := ".".join(path[begin:end])) in _INSTEAD:
            return ".".join(path[:end]), _INSTEAD[known]
    if _DTYPE.fullmatch(path[0]):
        return name, f"use {path[0]!r}"
    if path[0] == "random" and _has_name("keras", path):
        return name, f"use `keras.{name}`"
    for begin in begins:
        function = ".".join(path[begin:]).removeprefix("reduce_")
        if function and _has_name("keras.ops", function.split(".")):
            return name, f"use `keras.ops.{function}`"
    return name, "in steps use `keras.ops` or layers; elsewhere it needs TensorFlow"


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
        # Each note with its lines.
        self._notes: dict[str, list[int]] = {}
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
            self._tf_imports.append(node)
            for alias in node.names:
                path = _without_v2([*inside, alias.name])
                self._bindings[alias.asname or alias.name] = path
            return
        for alias in node.names:
            if not self._exists([*inside[1:], alias.name], node.lineno):
                return
        begin, end = self._span(node)
        new = ".".join([keras_strategy.__name__, *inside[1:]])
        text = self._bytes[begin:end].decode().replace(node.module or "", new, 1)
        self._changes.append((begin, end, text))

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.visit_Attribute(node)

    def visit_Attribute(self, node: ast.Attribute | ast.Name) -> None:
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
        if not num_bound:
            v2_path = _without_v2(path)
            path, links = v2_path, links[len(path) - len(v2_path) :]
        if path[:1] == ["distribute"]:
            if self._exists(path[1:], node.lineno):
                self._replace(root if num_bound else links[0], self._package_name)
            return
        # Other functions of TensorFlow that belong to tf.distribute.
        ours = path[1:] if path[:1] == ["nn"] else path
        is_outside = path[:1] in (["nn"], ["tpu"]) and ours
        if is_outside and _has_name(keras_strategy.__name__, ours):
            self._replace(node, ".".join([self._package_name, *ours]))
            return
        if path and path[0] != "data":
            name, instead = _replacement(path)
            self._add_note(node.lineno, f"tf.{name}: On JAX and torch, {instead}.")

    def _add_note(self, line: int, note: str) -> None:
        lines = self._notes.setdefault(note, [])
        if line not in lines:
            lines.append(line)

    def _replace(self, node: ast.expr, text: str) -> None:
        self._num_uses -= 1
        self._changes.append((*self._span(node), text))

    def _exists(self, path: list[str], line: int) -> bool:
        exists, note = look_up_name(path)
        if note:
            self._add_note(line, f"tf.distribute.{'.'.join(path)}: {note}")
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
        notes = [(sorted(lines), note) for note, lines in self._notes.items()]
        texts = (
            f"line{'s' * (len(lines) > 1)} {', '.join(map(str, lines))}: {note}"
            for lines, note in sorted(notes)
        )
        return Ported(program.decode(), tuple(texts))

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
