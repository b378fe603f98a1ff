"""Parts of pages that are added when mkdocs builds them (a hook of mkdocs).

The programs of the gallery unfold below their pictures; in tables a number stays in one
line, and a long name is broken where its parts are.
"""

import pathlib
import re
import textwrap

ROOT = pathlib.Path(__file__).parents[1]
_PROGRAM = re.compile(r"^`(examples/\w+\.py)`(?:, and \[as(.*))?$", re.MULTILINE)
_CELL = re.compile(r"<td\b.*?</td>", re.DOTALL)
# Browsers break a line behind the hyphen of 1e-07.
_NUMBER = re.compile(r"(?<![\w.-])\d(?:\.\d+)?e-\d\d\b")
_LONG = re.compile(r"(?<=<code>)[^<]{20,}(?=</code>)")
_PART = re.compile(r"[_./:(]+(?=\w)")


def on_page_markdown(markdown: str, page, **_) -> str:
    """Insert each program into the gallery, folded."""
    if page.file.src_uri != "gallery.md":
        return markdown

    def folded(found: re.Match) -> str:
        code = textwrap.indent((ROOT / found[1]).read_text(), "    ")
        notebook = f"[As{found[2]}" if found[2] else ""
        block = f"    ```python\n{code}    ```"
        return f'??? example "{found[1]}"\n\n{block}\n\n{notebook}'

    return _PROGRAM.sub(folded, markdown)


def on_page_content(html: str, **_) -> str:
    """Says where lines of tables may be broken."""

    def parted(code: re.Match) -> str:
        return _PART.sub(r"\g<0><wbr>", code[0])

    def cell(found: re.Match) -> str:
        kept = _NUMBER.sub(r'<span class="number">\g<0></span>', found[0])
        return _LONG.sub(parted, kept)

    return _CELL.sub(cell, html)
