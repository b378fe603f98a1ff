"""Check the language of the documentation, of docstrings and of comments.

    python tools/check_docs.py

- A docstring starts with a verb or a noun, not with a question word.
- An `Args:` entry says more than the argument's name.
- Every module, file, package, make target, command and public name that a page of the
  documentation names exists.
- A page has at most 2,500 words, and 40 in a sentence. No sentence starts with a
  question word, except questions, titles of pages, and headings like "How it works".
- Pages, and docstrings and comments of the package and of tests, have no phrase of
  tools/phrases.tsv.
"""

import ast
import contextlib
import functools
import importlib
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = ("keras_strategy", "benchmarks", "conformance", "examples", "tests", "tools")
# Without phrases of tools/phrases.tsv in docstrings and comments.
PLAIN = {"keras_strategy", "conformance", "tests"}
PAGES = ("docs/*.md", "README.md", "CONTRIBUTING.md")
# The changelog and the benchmarks' history name what existed at the time.
HISTORY = {"docs/benchmarks_history.md"}
OPENINGS = frozenset(
    ("what", "whether", "where", "how", "which", "who", "of", "has", "see")
    + ("surrounds", "notes", "likewise")
)
# At the start of a heading, or of a sentence that refers to a page.
HEADING_OPENINGS = {"how", "what", "where", "which", "see"}
PAGE_WORDS = 2_500
SENTENCE_WORDS = 40
# Pages that may be longer: tables of measurements, and an entry per name or message.
LONG = {"benchmarks", "conformance", "equality", "errors", "patches", "tf_distribute"}
LONG |= {"errors_without_a_fix"}
# Words of a description that add nothing to the name of an argument.
FILLERS = frozenset(
    ("a", "an", "the", "of", "this", "its", "to", "for", "which", "is", "are", "that")
)

_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_ENTRY = re.compile(r"^\s+\**(\w+)(?: \([^)]*\))?: (.*)$")
_CODE_SPAN = re.compile(r"`([^`\n]+)`")
_MODULE = re.compile(r"(?<![\w./-])keras_strategy(?:\.\w+)+")
_PATH = re.compile(
    r"(?<![\w./-])(?:(?:keras_strategy|tests|tools|benchmarks|conformance)/[\w./]*[\w/]"
    r"|examples/\w+\.py)"
)
_PUBLIC = re.compile(r"(?<![\w.])ks((?:\.\w+)+)")
# Not on PyPI: `pip install ".[torch]"`.
_UNPUBLISHED = re.compile(r"keras-strategy\[[\w,]+\]|pip install \"?keras[-_]strategy")
_MAKE = re.compile(r"^make ([a-z][a-z-]+)")
_COMMAND = re.compile(r"(?<![\w./-])keras-strategy ([a-z]+)")
_PHRASES = re.findall(
    r"^(.+)\t(.+)$", (ROOT / "tools" / "phrases.tsv").read_text(), re.MULTILINE
)
_NOT_PROSE = re.compile(r"^ *```.*?^ *```$|<!--.*?-->", re.M | re.S)
_SPAN = re.compile(r"`[^`]+`|\]\([^)]*\)|<[^>\n]+>")
_TABLE = re.compile(r"^ *\|.*$", re.M)
_SENTENCE_END = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\. ))|(?<=[.!?])[)*\"']*\s+")
_OPENING = re.compile(r"(#*)(?:[-*]? |\d+\. )?(?:\*\*)?[(\"]?([A-Z][a-z]+)")


def find_repeated_arguments(docstring: str) -> Iterator[str]:
    """Yield the names of arguments whose description says nothing more."""
    _, found, section = docstring.partition("Args:\n")
    for line in section.splitlines() if found else ():
        if line and not line[0].isspace():
            return
        match = _ENTRY.match(line)
        if match:
            words = re.findall(r"[a-z]+", match[2].lower())
            name = set(re.findall(r"[a-z]+", match[1].lower()))
            names = name | {f"{word}s" for word in name}
            if not set(words) - FILLERS - names:
                yield match[1]


def check_docstrings(path: Path, source: str) -> Iterator[str]:
    """Yield the problems of one file's docstrings, each with its place."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, _DOCUMENTED):
            continue
        docstring = ast.get_docstring(node) or ""
        place = f"{path}:{getattr(node, 'lineno', 1)}"
        first = docstring.partition(" ")[0].rstrip(",.:")
        if first.lower() in OPENINGS:
            yield (
                f"{place}: expected a docstring that starts with a verb or a noun. "
                f"Received: {first!r}"
            )
        for argument in find_repeated_arguments(docstring):
            yield (
                f"{place}: the description of argument `{argument}` only repeats its "
                "name. Say what is surprising about it, or delete it"
            )


def find_phrases(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line of each phrase of tools/phrases.tsv, and what to write instead."""
    text = _SPAN.sub(_blank, text)
    for phrase, instead in _PHRASES:
        phrase = rf"\b(?:{phrase})\b".replace(" ", " +")
        for match in re.finditer(phrase, text.replace("\n", " "), re.IGNORECASE):
            line = text.count("\n", 0, match.start())
            yield line, f"{match[0]!r}. Write instead: {instead}"


def find_phrases_of_code(path: Path, source: str) -> Iterator[str]:
    """Yield the phrases in the docstrings and comments of one file."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.string.startswith(("#", '"""', 'r"""')):
            for line, problem in find_phrases(token.string):
                yield f"{path}:{token.start[0] + line}: {problem}"


def check_page(page: str, text: str) -> Iterator[str]:
    """Yield the problems of a page's language, each with its place."""
    count = len(text.split())
    if count > PAGE_WORDS and Path(page).stem not in LONG:
        yield f"{page}:1: {count:,} words. Split the page: at most {PAGE_WORDS:,}"
    text = _NOT_PROSE.sub(_blank, text)
    for line, problem in find_phrases(text):
        yield f"{page}:{line + 1}: {problem}"
    text, start = _TABLE.sub(_blank, _SPAN.sub(_blank, text)), 0
    for end in [*(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]:
        sentence, start = text[start:end].lstrip(), end
        place = f"{page}:{text.count(chr(10), 0, end - len(sentence)) + 1}"
        shown = " ".join((words := sentence.split())[:5])
        if len(words) > SENTENCE_WORDS:
            yield f"{place}: {len(words)} words in {shown!r}. Split: at most 40"
        first = _OPENING.match(sentence)
        allowed = HEADING_OPENINGS if first and first[1] else {"see"}
        if first and first[2].lower() in OPENINGS - allowed and "?" not in words[-1]:
            yield f"{place}: {shown!r}. Start with the subject, a verb or a condition"


def _blank(match: re.Match[str]) -> str:
    """Return as many characters and lines: one word for code, or none."""
    filler = "x" if re.match("`[^`]", match[0]) else " "
    return re.sub(r"[^\n]", filler, match[0])


def find_unknown_names(text: str, targets: set[str]) -> set[str]:
    """Return what a page names and the repository does not have."""
    unknown = {name for name in _MODULE.findall(text) if not _is_known_module(name)}
    unknown |= set(_UNPUBLISHED.findall(text))
    unknown |= {path for path in _PATH.findall(text) if not (ROOT / path).exists()}
    for span in _CODE_SPAN.findall(text):
        unknown |= {f"ks{n}" for n in _PUBLIC.findall(span) if not _is_public(n)}
        unknown |= {f"make {n}" for n in _MAKE.findall(span) if n not in targets}
        unknown |= {
            f"keras-strategy {n}" for n in _COMMAND.findall(span) if not _is_command(n)
        }
    return unknown


def _is_known_module(name: str) -> bool:
    """Return True if the name is a module, or is in a module's source."""
    module, names = name, []
    while not (path := ROOT / module.replace(".", "/")).is_dir():
        if path.with_suffix(".py").exists():
            path = path.with_suffix(".py")
            break
        module, _, last = module.rpartition(".")
        names.append(last)
    if not names:
        return True
    sources = [path] if path.is_file() else path.glob("__init__.py*")
    return any(
        re.search(rf"\b{re.escape(names[-1])}\b", source.read_text())
        for source in sources
    )


@functools.cache
def _is_command(name: str) -> bool:
    """Return True if the command line has a subcommand of that name."""
    main = importlib.import_module("keras_strategy.commands.cli").main
    ignored = io.StringIO()
    with contextlib.redirect_stdout(ignored), contextlib.redirect_stderr(ignored):
        try:
            main([name, "--help"])
        except SystemExit as end:
            return end.code == 0
    return True


@functools.cache
def _is_public(dotted: str) -> bool:
    value = importlib.import_module("keras_strategy")
    for name in dotted.strip(".").split("."):
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True


def main() -> int:
    """Print every problem; return 1 if there is any."""
    problems = []
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name, source = path.relative_to(ROOT), path.read_text()
            problems += check_docstrings(name, source)
            if folder in PLAIN:
                problems += find_phrases_of_code(name, source)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            page = path.relative_to(ROOT).as_posix()
            if page not in HISTORY:
                problems += check_page(page, path.read_text())
                names = find_unknown_names(path.read_text(), targets)
                problems += [
                    f"{page}: `{name}` does not exist" for name in sorted(names)
                ]
    print(*problems, sep="\n")
    print(f"{len(problems)} problems in docstrings and pages", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
