"""Translation of a program's names from tf.distribute to this package.

Names are looked up in the package itself, so the notes report what would happen.
"""

import ast
import difflib
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import keras_strategy
from keras_strategy.core.unsupported_names import REASONS

_ALIAS = "ks"
# Functions of TensorFlow outside of tf.distribute that belong to it.
_OUTSIDE = {
    "nn.compute_average_loss": "compute_average_loss",
    "nn.scale_regularization_loss": "scale_regularization_loss",
    **{
        f"tpu.experimental.{name}": f"tpu.experimental.{name}"
        for name in keras_strategy.tpu.experimental.__all__
    },
}
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
_V1 = ["compat", "v1"]
_V1_NOTE = (
    "tf.compat.v1.distribute is TensorFlow 1's, and is not changed. Port the program "
    "to tf.distribute first."
)
_TENSORFLOW_ONLY = "It exists on TensorFlow only; JAX and torch raise an error: {}"


@dataclass(frozen=True)
class Ported:
    """Translated program.

    Attributes:
        text: The program with this package's names.
        notes: What to change by hand or to know, each with its line.
    """

    text: str
    notes: tuple[str, ...]


def port(source: str) -> Ported:
    """Replace tf.distribute's names in a program by this package's.

    Raises:
        SyntaxError: If `source` is not a Python program.
    """
    program = _Program(source)
    for node in ast.walk(program.tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            program.translate_import_from(node)
    program.visit(program.tree)
    return program.ported()


def diff(source: str, ported: Ported, name: str) -> str:
    """Return the changes in the format of `diff -u`, for a file of that name."""
    lines = difflib.unified_diff(
        source.splitlines(keepends=True),
        ported.text.splitlines(keepends=True),
        name,
        f"{name} (ported)",
    )
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)


def look_up_name(path: list[str]) -> tuple[bool, str]:
    """Look up a name of tf.distribute in this package.

    Args:
        path: The name's parts, as ["experimental", "CentralStorageStrategy"].

    Returns:
        True if the package has it, and a note, which may be empty.
    """
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


@dataclass(frozen=True)
class _Change:
    """Replacement of a range of bytes of a program."""

    begin: int
    end: int
    text: str


class _Program(ast.NodeVisitor):
    """Program during its translation."""

    def __init__(self, source: str):
        self.source, self.tree = source, ast.parse(source)
        self._line_starts = [0]
        for line in source.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line.encode()))
        self._bytes = source.encode()
        self._changes: list[_Change] = []
        self._notes: list[tuple[int, str]] = []
        # The path in TensorFlow that each name of the program is bound to.
        self._bindings: dict[str, list[str]] = {}
        self._tf_imports: list[ast.Import | ast.ImportFrom] = []
        # Uses of TensorFlow that remain.
        self._num_uses = 0
        nodes = list(ast.walk(self.tree))
        for node in nodes:
            if isinstance(node, ast.Import):
                self._record_import(node)
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        imported_as = self._package_import()
        self._is_imported = imported_as is not None
        default = _ALIAS if _ALIAS not in used else keras_strategy.__name__
        self._package_name = imported_as or default

    def _record_import(self, node: ast.Import) -> None:
        for alias in node.names:
            parts = alias.name.split(".")
            if parts[0] != "tensorflow":
                continue
            # `import tensorflow.distribute` binds `tensorflow`.
            bound = alias.asname or parts[0]
            self._bindings[bound] = _without_v2(parts[1:]) if alias.asname else []
            self._tf_imports.append(node)

    def _package_import(self) -> str | None:
        """Return the name under which the program imports this package already."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name == keras_strategy.__name__:
                        return alias.asname or alias.name
        return None

    def translate_import_from(self, node: ast.ImportFrom) -> None:
        """Record or change what is imported from TensorFlow."""
        parts = (node.module or "").split(".")
        if parts[0] != "tensorflow":
            return
        inside = parts[1:]
        if inside[:1] != ["distribute"]:
            for alias in node.names:
                if _without_v2([*inside, alias.name]) == ["distribute"]:
                    bound = alias.asname or alias.name
                    self._bindings[bound] = ["distribute"]
                    self._tf_imports.append(node)
            return
        for alias in node.names:
            if not self._exists([*inside[1:], alias.name], node.lineno):
                return
        begin, end = self._span(node)
        text = self._bytes[begin:end].decode()
        new = ".".join([keras_strategy.__name__, *inside[1:]])
        self._changes.append(
            _Change(begin, end, text.replace(node.module or "", new, 1))
        )

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
        if path[:3] == [*_V1, "distribute"]:
            self._notes.append((node.lineno, _V1_NOTE))
        if not num_bound:
            v2_path = _without_v2(path)
            path, links = v2_path, links[len(path) - len(v2_path) :]
        if path[:1] == ["distribute"]:
            if self._exists(path[1:], node.lineno):
                self._replace(root if num_bound else links[0], self._package_name)
            return
        for old, new in _OUTSIDE.items():
            parts = old.split(".")
            if path[: len(parts)] == parts and len(parts) > num_bound:
                last = links[len(parts) - num_bound - 1]
                self._replace(last, f"{self._package_name}.{new}")
                return
        for old, instead in _BY_HAND.items():
            if ".".join(path[: old.count(".") + 1]) == old:
                note = f"tf.{old}: On JAX and torch, {instead}."
                self._notes.append((node.lineno, note))

    def _replace(self, node: ast.expr, text: str) -> None:
        self._num_uses -= 1
        self._changes.append(_Change(*self._span(node), text))

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
        """Return the translated program."""
        changes = list(self._changes)
        if any(change.text.startswith(self._package_name) for change in changes):
            changes += self._package_imports()
        text = self._bytes
        for change in sorted(changes, key=lambda c: c.begin, reverse=True):
            text = text[: change.begin] + change.text.encode() + text[change.end :]
        notes = tuple(f"line {line}: {note}" for line, note in sorted(self._notes))
        return Ported(text.decode(), notes)

    def _package_imports(self) -> Iterator[_Change]:
        """Yield imports of this package: in place of TensorFlow's, or after it."""
        if self._is_imported or not self._tf_imports:
            return
        first = min(self._tf_imports, key=lambda node: node.lineno)
        statement = f"import {keras_strategy.__name__}"
        if self._package_name != keras_strategy.__name__:
            statement += f" as {self._package_name}"
        begin, end = self._span(first)
        if len(self._tf_imports) == len(first.names) == 1 and not self._num_uses:
            yield _Change(begin, end, statement)
            return
        # An import in a function binds the name in that function only.
        top_level = [node for node in self._tf_imports if node.col_offset == 0]
        nodes = self._tf_imports
        if top_level:
            nodes = [min(top_level, key=lambda node: node.lineno)]
        for node in nodes:
            _, end = self._span(node)
            yield _Change(end, end, f"\n{' ' * node.col_offset}{statement}")
