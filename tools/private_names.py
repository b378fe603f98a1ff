"""Find uses of Keras's private attributes outside of patch modules.

    python tools/private_names.py [FILE ...]

Which names are Keras's own is read from Keras: what its classes define or assign on
themselves with one leading underscore. A name is ours, not Keras's, in a file that
defines it or assigns it on `self`; and an attribute of `self` is a class's own affair
anyhow.
"""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "keras_strategy"
# What other libraries call so too, by the file that reaches it there.
OF_OTHERS = {
    # The sources of a `tf.data.Dataset`, and where a slice of grain's begins.
    "data/sources/tf_data.py": {"_inputs"},
    "data/sources/grain.py": {"_start"},
}
_BY_NAME = {"getattr", "setattr", "hasattr", "delattr", "attrgetter", "methodcaller"}


def is_private(name: str) -> bool:
    """Return True if a name begins with one underscore."""
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


def is_patch_module(path: Path) -> bool:
    """Return True if a file may use Keras's private names."""
    names = ("patches", "internals", "variables")
    parts = path.resolve().relative_to(PACKAGE).parts
    return parts[0] == "keras_patches" or (
        parts[0] == "backends" and parts[-1].startswith(names)
    )


def names_of_keras() -> set[str]:
    """Return the private attributes of Keras's classes."""
    # Not imported: that would import an engine, and see one backend's only.
    spec = importlib.util.find_spec("keras")
    assert spec is not None and spec.origin is not None
    names: set[str] = set()
    for path in (Path(spec.origin).parent / "src").rglob("*.py"):
        if path.name.endswith("_test.py"):
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ClassDef):
                names.update(_defined(node))
    return {name for name in names if is_private(name)}


def _defined(cls: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(cls):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _of_this_file(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and getattr(node.value, "id", None) in ("self", "cls")
        ):
            yield node.attr


def found_in(source: str, names: set[str]) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each use of a private name of Keras."""
    tree = ast.parse(source)
    names = names - set(_of_this_file(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            own = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
            if node.attr in names and not own:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call):
            function = node.func
            called = getattr(function, "id", None) or getattr(function, "attr", None)
            for argument in node.args if called in _BY_NAME else ():
                if isinstance(argument, ast.Constant) and argument.value in names:
                    yield node.lineno, str(argument.value)


def main(arguments: list[str]) -> int:
    """Print what was found; the exit status is 1 where anything was."""
    names = names_of_keras()
    files = [Path(name) for name in arguments] or sorted(PACKAGE.rglob("*.py"))
    bad = 0
    for path in files:
        if is_patch_module(path):
            continue
        others = OF_OTHERS.get(path.resolve().relative_to(PACKAGE).as_posix(), set())
        for line, name in found_in(path.read_text(), names - others):
            bad += 1
            print(
                f"{path}:{line}: `{name}` is private to Keras: use it in a patch "
                "module, or use a public name"
            )
    print(
        f"{bad} private attributes of Keras outside of patch modules", file=sys.stderr
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
