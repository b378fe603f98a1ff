"""Tables of the results, docs/conformance.md and docs/conformance.tsv."""

import re
import textwrap
from collections.abc import Sequence
from typing import Any

from benchmarks.tables import markdown
from conformance.environments import ROOT
from conformance.program import Program, all_programs
from conformance.systems import ALL, System

PAGE = ROOT / "docs" / "conformance.md"
FIGURES = PAGE.with_suffix(".tsv")
_ERROR_CHARACTERS = 32
# What a warning says of a program that is equal since its step is not split.
_REMEDIES = {"the step runs whole": "whole", "computes on the rows of all": "gathered"}


def cell_text(cell: dict[str, Any]) -> str:
    """Return a cell: differences in weights and logs, an error, or a dash."""
    if "skipped" in cell:
        return "–"
    if "error" in cell:
        # TensorFlow puts the node's name in front.
        text = re.sub(r"\{\{.*?\}\} ", "", cell["error"])
        text = text.replace("|", "/").replace("`", "'")
        if len(text) > _ERROR_CHARACTERS:
            text = f"{text[:_ERROR_CHARACTERS].rstrip()}..."
        return f"`{text}`"
    text = f"{cell['weights']:.0e} / {cell['logs']:.0e}"
    if not cell["equal"]:
        text = f"**{text}**"
        if cell["warnings"]:
            text += " (warns)"
    return text


def progress(cell: dict[str, Any]) -> str:
    """Return a line for the terminal."""
    mark = "  " if cell["equal"] or "skipped" in cell else "! "
    place = f"{cell['system']} {cell['program']} N={cell['replicas']} {cell['rows']}"
    text = cell.get("error", cell.get("skipped", "")) or cell_text(cell)
    warned = "".join(f"\n      {w[:300]}" for w in cell.get("warnings", ()))
    return f"{mark}{place}: {text} ({cell['seconds']} s){warned}"


def scores(results: dict[str, Any]) -> str:
    """Return the table of scores, with a row for each system of the results."""
    columns = sorted({c["replicas"] for c in _cells(results)})
    first = columns[0]
    ends = ("differs, with a warning", "raises", "not applicable")
    numbers = [f"N = {n}" for n in columns]
    lines = []
    for system in _systems(results):
        cells = [c for c in _cells(results) if c["system"] == system.name]
        uneven = [c for c in cells if c["rows"] == "uneven"]
        texts = [_score([c for c in uneven if c["replicas"] == n]) for n in columns]
        # A program that equals one device with an uneven batch is not run again.
        full = {c["program"]: c for c in uneven if c["replicas"] == first}
        shown = list(full.values())
        full |= {c["program"]: c for c in cells if c["rows"] == "full"}
        warned = sum(not c["equal"] and bool(c.get("warnings")) for c in shown)
        counts = [warned, *(sum(k in c for c in shown) for k in ("error", "skipped"))]
        full_score = _score(list(full.values()))
        lines.append((system.title, *texts, full_score, *map(str, counts)))
    head = ("system", *numbers, f"N = {first}, full batches", *ends)
    return markdown(head, lines)


def _score(cells: list[dict[str, Any]]) -> str:
    ran = [c for c in cells if "skipped" not in c]
    return f"{sum(c['equal'] for c in ran)} of {len(ran)}"


def _cells(results: dict[str, Any]) -> list[dict[str, Any]]:
    known = {program.name for program in all_programs()}
    return [line for line in _lines(results) if line.get("program") in known]


def _lines(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [line for found in results.values() for line in found["lines"]]


def _systems(results: dict[str, Any]) -> list[System]:
    return [system for name, system in ALL.items() if name in results]


def tables(results: dict[str, Any], programs: Sequence[Program]) -> str:
    """Return the scores, and a table of all cells for each number of replicas."""
    chosen = _systems(results)
    found = {
        (c["system"], c["program"], c["replicas"], c["rows"]): c
        for c in _cells(results)
    }
    texts = [scores(results)]
    for n in sorted({c["replicas"] for c in _cells(results)}):
        lines: list[tuple[str, ...]] = []
        for family in sorted({p.family for p in programs}):
            lines.append((f"**{family}**", *("" for _ in chosen)))
            for program in (p for p in programs if p.family == family):
                row = (_texts(found, s.name, program.name, n) for s in chosen)
                lines.append((program.name, *row))
        head = ("program", *(s.title for s in chosen))
        texts.append(f"## N = {n}\n\n{markdown(head, lines)}")
    return "\n\n".join(texts)


def _texts(found: dict[Any, dict[str, Any]], system: str, program: str, n: int) -> str:
    cell = found.get((system, program, n, "uneven"))
    if cell is None:
        return "not run"
    text, full = cell_text(cell), found.get((system, program, n, "full"))
    if full is not None and not cell["equal"]:
        text += f"; full: {cell_text(full)}"
    return text


def outcome(cell: dict[str, Any], full: dict[str, Any] | None = None) -> str:
    """Return a cell in a word; `full` is the same program with full batches."""
    if "skipped" in cell:
        return "–"
    if cell["equal"]:
        said = " ".join(cell.get("warnings", ()))
        remedies = (word for text, word in _REMEDIES.items() if text in said)
        return next(remedies, "equal")
    if full is not None and full["equal"]:
        return "full"
    if "error" in cell:
        return "raises"
    return "warns" if cell["warnings"] else "differs"


def outcomes(results: dict[str, Any], programs: Sequence[Program]) -> str:
    """Return the table of outcomes with the smallest number of replicas."""
    chosen = _systems(results)
    first = min(c["replicas"] for c in _cells(results))
    found = {
        (c["system"], c["program"], c["rows"]): c
        for c in _cells(results)
        if c["replicas"] == first
    }
    lines = [
        (
            program.name,
            *(
                outcome(
                    found[system.name, program.name, "uneven"],
                    found.get((system.name, program.name, "full")),
                )
                for system in chosen
            ),
        )
        for program in programs
    ]
    return markdown(("program", *(s.title for s in chosen)), lines)


def write_figures(results: dict[str, Any]) -> None:
    """Write all cells as a table of tab-separated values."""
    columns = ("system", "program", "replicas", "rows")
    lines = ["\t".join((*columns, "outcome", "weights", "logs", "error"))]
    for cell in _cells(results):
        figures = [f"{cell[k]:.0e}" if k in cell else "" for k in ("weights", "logs")]
        error = " ".join(cell.get("error", "").split())
        values = [str(cell[column]) for column in columns]
        lines.append("\t".join([*values, outcome(cell), *figures, error]))
    FIGURES.write_text("\n".join(lines) + "\n")


def write_page(results: dict[str, Any]) -> None:
    """Write the measured parts of docs/conformance.md, and the figures beside it."""
    programs = all_programs()
    versions: dict[str, set[str]] = {}
    for line in _lines(results):
        for name, version in line.get("versions", {}).items():
            versions.setdefault(name, set()).add(version)
    named = ", ".join(
        f"{name} {' and '.join(sorted(found))}" for name, found in versions.items()
    )
    minutes = sum(found["minutes"] for found in results.values())
    date = max(found["date"] for found in results.values())
    values = {
        "run": textwrap.fill(
            f"{len(programs)} programs on {len(ALL)} systems take {minutes:.0f} minutes"
            f" on a machine of 2 cores. Measured on {date}, on CPUs, with {named}.",
            88,
        ),
        "scores": scores(results),
        "systems": "\n".join(f"- {s.title}: {_source(s.page)}" for s in ALL.values()),
        "outcomes": outcomes(results, programs),
    }
    text = PAGE.read_text()
    for name, value in values.items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(start)
        text = f"{before}{start}\n{value}\n\n{end}{rest.partition(end)[2]}"
    PAGE.write_text(text)
    write_figures(results)


def _source(page: str) -> str:
    return f"<{page}>" if page.startswith("http") else f"[{page}]({page})"
