"""The blocks of code of a page, and what the page says of them.

A comment in the line before a block says how it is run:

    <!-- on: jax or torch -->            on these backends alone
    <!-- peer: horovod on tensorflow --> the same, where that package is, as a launcher
                                         of one process would start it
    <!-- alone -->                       in a process of its own
    <!-- not run: REASON -->             not at all

What a page leaves out is in a comment of several lines that begins with `<!-- set-up`.
Snippets are files of docs/manifests. All else that is Python is one program, from the
top of the page to its end. A block of the language `diff` is two programs: before and
after.
"""

import pathlib
import re
import textwrap
from dataclasses import dataclass

_MANIFESTS = pathlib.Path(__file__).parents[1] / "docs" / "manifests"
_SNIPPET = re.compile(r'^--8<-- "([\w.]+)"$', re.MULTILINE)

_PART = re.compile(
    r"<!-- set-up\n(?P<given>.*?)-->"
    r"|(?:<!-- (?P<mark>[^\n]*) -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
_MARK = re.compile(
    r"(?P<alone>alone)|on: (?P<on>\w+(?: or \w+)*)"
    r"|peer: (?P<peer>\w+) on (?P<peers>\w+(?: or \w+)*)|not run: (?P<reason>.+)"
)


@dataclass(frozen=True)
class Block:
    """A block of code.

    Args:
        language: What stands behind its fence.
        code: Its lines.
        line: The line of the page that it begins in.
        backends: Those that it is for; none for all.
        peer: The package that it is a program of, or None.
        reason: Why it is not run, or None.
        alone: Whether it is a program by itself.
        is_hidden: Whether it is set-up, which readers do not see.
    """

    language: str
    code: str
    line: int
    backends: tuple[str, ...] = ()
    peer: str | None = None
    reason: str | None = None
    alone: bool = False
    is_hidden: bool = False


def blocks_of(text: str) -> list[Block]:
    """The blocks of a page, and its set-up, in their order."""
    blocks = []
    for part in _PART.finditer(text):
        if part["given"] is not None:
            line = text.count("\n", 0, part.start("given")) + 1
            blocks.append(Block("python", part["given"], line, is_hidden=True))
            continue
        line = text.count("\n", 0, part.start("code")) + 1
        mark = _MARK.fullmatch(part["mark"] or "")
        said = mark.groupdict() if mark else {}
        on = said.get("on") or said.get("peers")
        blocks.append(
            Block(
                part["language"],
                textwrap.dedent(_SNIPPET.sub(_read_manifest, part["code"])),
                line,
                tuple(on.split(" or ")) if on else (),
                said.get("peer"),
                said.get("reason"),
                bool(said.get("alone")),
            )
        )
    return blocks


def _read_manifest(snippet: re.Match[str]) -> str:
    return (_MANIFESTS / snippet[1]).read_text().rstrip("\n")


def sides_of(diff: str) -> tuple[str, str]:
    """The programs of a diff: before, and after."""
    lines = diff.splitlines(keepends=True)
    before, after = (
        "".join(line[1:] or line for line in lines if line[0] != sign) for sign in "+-"
    )
    return before, after
