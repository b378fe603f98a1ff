"""Writes what was measured into the documentation: `python -m benchmarks.pages [FILE]`.

FILE is what `python -m benchmarks --json FILE` has written. It is kept in
`benchmarks/history` under its version and date, and becomes the table of
docs/benchmarks.md and a column of docs/benchmarks_history.md. Of several files of one
date, the rows of the last one count. Without a file both are written again. Of the runs
before the newest, the folder keeps only the ratios that the page shows.
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
    found = [json.loads(path.read_text()) for path in HISTORY.glob("*.json")]
    return sorted(found, key=lambda run: run["date"], reverse=True)


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
    for backend in BACKENDS:
        rows: dict[tuple[str, str], dict[str, str]] = {}
        for run in kept:
            for row in run["rows"]:
                if row["backend"] == backend:
                    cells = rows.setdefault((row["case"], row["peer"]), {})
                    cells[_name(run)] = _cell(row)
        lines = [(*key, *(c.get(n, "") for n in columns)) for key, c in rows.items()]
        table = markdown(("case: ours", "peer", *columns), lines)
        parts += ["", f"## {backend}", "", table]
    return "\n".join([*parts, "", CHANGES.read_text()])


def _name(run: dict[str, Any]) -> str:
    return f"{run['version']}, {run['date']}"


def _describe(run: dict[str, Any]) -> str:
    packages = run["packages"].items()
    versions = ", ".join(f"{name} {version}" for name, version in packages)
    return f"{run['machine']}; {versions}. {run.get('note', '')}".strip()


def _cell(row: dict[str, Any]) -> str:
    ratios = (f"{row['speeds'][unit]['ratio']:.2f}" for unit in (WALL, CPU))
    return " / ".join(ratios) + (" ~" if is_noisy(row) else "")


def keep(file: Path) -> None:
    """Add a run to the history, or its rows to those of its day."""
    run = json.loads(file.read_text())
    path = _path(run)
    if path.exists():
        run["rows"] = merge_rows(json.loads(path.read_text())["rows"], run["rows"])
    _write(run)
    _, *older = runs()
    for place, run in enumerate(older, 1):
        if place < _SHOWN:
            _write({**run, "rows": [_only_shown(row) for row in run["rows"]]})
        else:
            _path(run).unlink()


def _write(run: dict[str, Any]) -> None:
    """Write a run into the history, each row in a line."""
    rows = ",\n".join(json.dumps(r, separators=(",", ":")) for r in run["rows"])
    text = json.dumps({**run, "rows": []}, indent=1)
    text = text.replace('"rows": []', f'"rows": [\n{rows}\n ]')
    _path(run).write_text(text + "\n")


def _only_shown(row: dict[str, Any]) -> dict[str, Any]:
    """Return what the page of the history shows of a row."""
    shown = {name: row[name] for name in ("backend", "case", "peer")}
    shown["speeds"] = {
        unit: {"ratio": round(speed["ratio"], 4)}
        for unit, speed in row["speeds"].items()
    }
    return {**shown, "noise": row["noise"]} if is_noisy(row) else shown


def _path(run: dict[str, Any]) -> Path:
    return HISTORY / f"{run['version']}-{run['date']}.json"


def main() -> None:
    for name in sys.argv[1:]:
        keep(Path(name))
    kept = runs()
    RESULTS.write_text(with_results(RESULTS.read_text(), kept[0]))
    PAGE.write_text(history(kept))


if __name__ == "__main__":
    main()
