"""Results of a run on GPUs, as Markdown."""

from collections.abc import Iterator
from typing import Any

from benchmarks.paired_timing import CPU, WALL
from benchmarks.tables import format_pair, format_ratio, markdown

_EQUAL = ("equals one device", "largest differences", "tolerances", "")
_RATIOS = (
    *("program", "peer", "ratio of steps/s", "of steps/CPU-s", "once per call, ms"),
    *("memory of the device, MB", "of the host, MB"),
)
_MEMORY = ("program", "most memory of the device, beside one device's, MB", "at rest")


def report(run: dict[str, Any]) -> str:
    """Return the backends, and a table for each kind of rows."""
    kind = "A rehearsal on CPU devices" if run["rehearsal"] else "A run on GPUs"
    lines = [f"{kind}, {run['date']}, keras_strategy {run['version']}.", ""]
    lines += [f"- {name}: {_engine(about)}" for name, about in run["engines"].items()]
    tables: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    ends = []
    for section in run["sections"]:
        name = f"{section['backend']}, {section['title']}"
        if section["skipped"]:
            ends.append(f"- {name}: not run, {section['skipped']}")
        elif section["error"]:
            ends.append(f"- {name}: failed, {_last_line(section['error'])}")
        for row in section["rows"]:
            for head, cells in _cells(row):
                tables.setdefault(head, []).append((section["backend"], *cells))
    for head, rows in tables.items():
        lines += ["", markdown(("backend", *head), rows)]
    return "\n".join([*lines, "", *ends]) + "\n"


def _cells(row: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yield the lines of a row, each with the head of its table."""
    if "tolerance" in row:
        verdict = "equal" if row.get("equal") else row.get("error", "**differs**")
        numbers = row.get("difference", ()), row["tolerance"]
        texts = (" / ".join(f"{value:.0e}" for value in each) for each in numbers)
        yield _EQUAL, (row["what"], *texts, verdict)
    if "speeds" in row:
        yield (
            _RATIOS,
            (
                *(row["what"], row["peer"]),
                *(format_ratio(row["speeds"][unit]) for unit in (WALL, CPU)),
                format_pair(row["once_seconds"], 1000, ".0f"),
                format_pair(row["device_megabytes"], 1, ".0f"),
                format_pair(row["peak_mb"], 1, ".0f"),
            ),
        )
    if "resting_megabytes" in row:
        names = "device_megabytes", "resting_megabytes"
        yield _MEMORY, (row["what"], *(format_pair(row[n], 1, ".0f") for n in names))


def _engine(about: dict[str, Any]) -> str:
    gpus = ", ".join(about.get("gpus", ())) or "no GPU"
    named = {k: v for k, v in about.items() if k not in ("gpus", "error")}
    text = ", ".join(f"{name} {value}" for name, value in named.items())
    return f"{text}; {gpus}" if named else _last_line(about["error"])


def _last_line(error: str) -> str:
    return error.strip().splitlines()[-1]
