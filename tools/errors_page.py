"""Write docs/errors.md, the table of all errors and warnings, from the code.

    python tools/errors_page.py

A message says what was expected or happened, what was received, and what to do. The
page splits each message after its first sentence, and leaves out what was received. A
test compares the page with the code.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "keras_strategy"
PAGE = ROOT / "docs" / "errors.md"

HEAD = """\
# Errors and warnings

Search this page for the first words of a message. `…` stands for a value of your
program. `make errors` writes it from the code, {count} messages in all.
"""
SECTIONS = {
    "strategies": "Strategies",
    "options": "Options",
    "data": "Data",
    "training": "Training",
    "keras_patches": "`fit`, layers, optimizers and saving",
    "core": "Replica context",
    "values": "Values",
    "devices": "Devices",
    "topology": "TPU topologies",
    "config": "Configuration",
    "backends": "Backends",
    "cluster": "Workers",
    "cluster_resolver": "Cluster resolvers",
    "coordinator": "Coordinator",
    "experimental": "Experimental",
    "tpu": "TPU",
    "commands": "Command line and launcher",
    "testing": "Tests with workers",
}
_WARNINGS = {"warnings.warn": "Warning", "logger.warning": "log", "logger.error": "log"}
_SHORTEST = 12


@dataclass(frozen=True)
class Message:
    """A message of the package.

    Attributes:
        section: The layer that reports it.
        kind: The exception class, "Warning" or "log".
        text: The text, with an ellipsis for each value.
    """

    section: str
    kind: str
    text: str

    def split(self) -> tuple[str, str]:
        """Return the first sentence, and the others without what was received."""
        first, *others = re.split(r"(?<=[.;!?]) (?=[A-Z…])|(?<=:) (?=[A-Z])", self.text)
        return first, " ".join(s for s in others if not s.startswith("Received"))


def find_messages() -> list[Message]:
    """Return the messages of the package, each once, in the order of the sections."""
    found: dict[Message, None] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        section = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        section = section.removesuffix("_proto")
        for kind, text in read_messages(path.read_text()):
            if section in SECTIONS and len(text) >= _SHORTEST:
                found[Message(section, kind, text)] = None
    order = list(SECTIONS)
    return sorted(found, key=lambda message: order.index(message.section))


def read_messages(source: str) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each error and warning of a module."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        kind = _WARNINGS.get(name)
        if kind is None and re.fullmatch(r"[A-Z]\w*(Error|Failed|Timeout)", name):
            kind = name
        if kind and node.args:
            text = _text(node.args[0])
            if text:
                yield kind, re.sub(r"%[sdr]", "…", text)


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return " ".join(node.value.split())
    if isinstance(node, ast.JoinedStr):
        parts = [
            str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values
        ]
        return " ".join("".join(parts).split())
    return ""


def write_page() -> str:
    """Return the page."""
    messages = find_messages()
    lines = [HEAD.format(count=len(messages))]
    for section, title in SECTIONS.items():
        rows = [message for message in messages if message.section == section]
        if rows:
            lines += [f"## {title}\n", "| kind | message | cause and fix |"]
            lines += ["| --- | --- | --- |"]
            lines += [_row(message) for message in rows] + [""]
    return "\n".join(lines).rstrip() + "\n"


def _row(message: Message) -> str:
    first, others = map(_escape, message.split())
    return f"| {message.kind} | {first} | {others} |".replace("|  |", "| |")


def _escape(text: str) -> str:
    return re.sub(r"([|<>*_\[\]{}])", r"\\\1", text).replace("`", "")


if __name__ == "__main__":
    PAGE.write_text(write_page())
