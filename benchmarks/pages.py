"""Writes what was measured into the documentation: `python -m benchmarks.pages [FILE]`.

FILE is what `python -m benchmarks --json FILE` has written. It becomes the table of
docs/benchmarks.md and a column of docs/benchmarks_history.md. Of several files of one
date, the rows of the last one count. Without a file both are written again. In
`benchmarks/history` is the newest run, and of earlier ones the cells of the page.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.comparisons import BACKENDS
from benchmarks.paired_timing import CPU, WALL
from benchmarks.tables import comparisons_table, is_noisy, markdown

ROOT = Path(__file__).parents[1]
HISTORY = ROOT / "benchmarks" / "history"
RESULTS = ROOT / "docs" / "benchmarks.md"
PAGE = ROOT / "docs" / "benchmarks_history.md"
CHANGES = HISTORY / "changes.md"
_MARKED = r"(?<=<!-- {0} -->\n\n).*?(?=\n\n<!-- end of {0} -->)"
# Rows of the summary: their name, backend, cases and peer.
IN_SHORT = (
    ("`fit`, one device of a strategy", "", r"fit, \w+Strategy", "plain Keras"),
    ("`fit`, two devices", "jax", r"fit, MirroredStrategy", "keras.distribution"),
    ("`fit`, two devices", "tensorflow", r"steps of fit, .*", "Keras on tf.distribute"),
    ("`fit`, two processes", "torch", r"fit, 2 processes", "Keras under DDP"),
    ("`fit` compiled, two processes", "torch", r"fit compiled, .*", "Keras under DDP"),
    ("`fit`, two processes", "jax", r"fit, 2 processes", "keras.distribution"),
    ("`fit`, two replicas in turns", "torch", r"fit, 2 replicas", "plain Keras"),
    ("loops of `run`", "jax", r"run.*", "jax.jit over a mesh"),
    ("loops of `run`", "torch", r"run.*", "Keras under DDP"),
    ("loops of `run`", "tensorflow", r"loop.*", "tf.function of run"),
)

HEAD = """\
# How fast it was

This page shows the newest three runs of the benchmark, and what was optimized. A cell
has the ratio of steps/s and that of steps/CPU-s, ours to the peer's, as on [How fast it
is](benchmarks.md). A `~` marks a machine that other programs used too. `python -m
benchmarks.pages benchmarks.json` adds a run and writes this page from
`benchmarks/history`.
"""
_SHOWN = 3


def runs() -> list[dict[str, Any]]:
    """Return all that were kept, newest first."""
    if not (HISTORY / "runs.json").exists():
        return []
    kept = json.loads((HISTORY / "runs.json").read_text())
    found = {_name(run): {**run, "rows": []} for run in kept["runs"]}
    for row in kept["rows"]:
        key = {name: row[name] for name in ("backend", "case", "peer")}
        for name, cell in row.pop("earlier").items():
            found[name]["rows"].append({**key, "cell": cell})
        if row != key:
            next(iter(found.values()))["rows"].append(row)
    return list(found.values())


def merge_rows(
    rows: list[dict[str, Any]], later: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return rows in their places, replaced by those that were measured later."""
    found = {(r["backend"], r["case"], r["peer"]): r for r in [*rows, *later]}
    order = {backend: place for place, backend in enumerate(BACKENDS)}
    return sorted(found.values(), key=lambda row: order[row["backend"]])


def with_results(text: str, run: dict[str, Any]) -> str:
    """Return a page with the tables between their marks replaced by a run's."""
    tables = {"results": comparisons_table(run["rows"]), "in short": in_short(run)}
    for mark, content in tables.items():
        place = re.compile(_MARKED.format(mark), re.S)
        text, count = place.subn(lambda _, content=content: content, text)
        if count != 1:
            raise ValueError(f"The text must have the marks of {mark!r} once.")
    return text


def in_short(run: dict[str, Any]) -> str:
    """Return the table of the smallest and the largest ratio of comparable rows."""
    lines = []
    for what, backend, case, peer in IN_SHORT:
        for on in [backend] if backend else BACKENDS:
            found = [
                row["speeds"]
                for row in run["rows"]
                if row["backend"] == on
                and row["peer"].startswith(peer)
                and re.fullmatch(case, row["case"].partition(": ")[2])
            ]
            ratios = [_range([s[unit]["ratio"] for s in found]) for unit in (WALL, CPU)]
            lines.append((what, on, peer, *ratios))
    return markdown(("ours", "on", "beside", WALL, CPU), lines)


def _range(ratios: list[float]) -> str:
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return low if low == high else f"{low} to {high}"


def history(kept: list[dict[str, Any]]) -> str:
    """Return the page of the newest runs."""
    kept = kept[:_SHOWN]
    columns = [_name(run) for run in kept]
    parts = [HEAD, "## The runs", ""]
    parts += [f"- **{_name(run)}**: {_describe(run)}" for run in kept]
    rows = _cells_of_rows(kept).items()
    for backend in BACKENDS:
        lines = [
            (case, peer, *(cells.get(name, "") for name in columns))
            for (on, case, peer), cells in rows
            if on == backend
        ]
        table = markdown(("case: ours", "peer", *columns), lines)
        parts += ["", f"## {backend}", "", table]
    return "\n".join([*parts, "", CHANGES.read_text()])


def _cells_of_rows(
    kept: list[dict[str, Any]],
) -> dict[tuple[str, str, str], dict[str, str]]:
    """Return the cells by run, for each backend, case and peer."""
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for run in kept:
        for row in run["rows"]:
            cells = rows.setdefault((row["backend"], row["case"], row["peer"]), {})
            cells[_name(run)] = _cell(row)
    return rows


def _name(run: dict[str, Any]) -> str:
    return f"{run['version']}, {run['date']}"


def _describe(run: dict[str, Any]) -> str:
    packages = run["packages"].items()
    versions = ", ".join(f"{name} {version}" for name, version in packages)
    return f"{run['machine']}; {versions}. {run.get('note', '')}".strip()


def _cell(row: dict[str, Any]) -> str:
    if "cell" in row:
        return row["cell"]
    ratios = (f"{row['speeds'][unit]['ratio']:.2f}" for unit in (WALL, CPU))
    return " / ".join(ratios) + (" ~" if is_noisy(row) else "")


def keep(file: Path) -> None:
    """Add a run to the history, or its rows to those of its day."""
    run = json.loads(file.read_text())
    found = {_name(run): run for run in runs()}
    if _name(run) in found:
        run["rows"] = merge_rows(found[_name(run)]["rows"], run["rows"])
    found[_name(run)] = run
    kept = sorted(found.values(), key=lambda run: run["date"], reverse=True)[:_SHOWN]
    cells = _cells_of_rows(kept[1:])
    rows = [
        {**row, "earlier": cells.pop((row["backend"], row["case"], row["peer"]), {})}
        for row in kept[0]["rows"]
    ]
    for (backend, case, peer), earlier in cells.items():
        key = {"backend": backend, "case": case, "peer": peer}
        rows.append({**key, "earlier": earlier})
    for run in kept:
        del run["rows"]
    # Each row in a line.
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    text = json.dumps({"runs": kept, "rows": []}, indent=1)
    text = text.replace('"rows": []', f'"rows": [\n{lines}\n ]')
    (HISTORY / "runs.json").write_text(text + "\n")


def main() -> None:
    for name in sys.argv[1:]:
        keep(Path(name))
    kept = runs()
    RESULTS.write_text(with_results(RESULTS.read_text(), kept[0]))
    PAGE.write_text(history(kept))


if __name__ == "__main__":
    main()
