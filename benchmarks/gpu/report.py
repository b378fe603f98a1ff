"""Results of a run on GPUs, as Markdown."""

from typing import Any

from benchmarks.paired_timing import CPU, WALL
from benchmarks.report import both, ratio


def report(run: dict[str, Any]) -> str:
    """Return the backends, and a table for each section with rows."""
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
            ends.append(
                f"- {name}: failed, {section['error'].strip().splitlines()[-1]}"
            )
        for row in section["rows"]:
            for head, cells in _cells(row):
                tables.setdefault(head, []).append((section["backend"], *cells))
    for head, rows in tables.items():
        lines += [""] + [
            "| " + " | ".join(cells) + " |"
            for cells in [("backend", *head), ("---",) * (len(head) + 1), *rows]
        ]
    return "\n".join([*lines, "", *ends]) + "\n"


_RATIOS = (
    *("program", "peer", "ratio of steps/s", "of steps/CPU-s", "once per call, ms"),
    *("memory of the device, MB", "of the host, MB"),
)
_MEMORY = ("program", "most memory of the device, beside one device's, MB", "at rest")
_EQUAL = ("equals one device", "largest differences", "tolerances", "")


def _cells(row: dict[str, Any]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yield the lines of a row, each with the head of its table."""
    found = []
    if "tolerance" in row:
        verdict = "equal" if row.get("equal") else row.get("error", "**differs**")
        differences = _numbers(row.get("difference", ()))
        tolerances = _numbers(row["tolerance"])
        found.append((_EQUAL, (row["what"], differences, tolerances, verdict)))
    if "speeds" in row:
        cells = (
            *(row["what"], row["peer"]),
            *(ratio(row["speeds"][unit]) for unit in (WALL, CPU)),
            both(row["once_seconds"], 1000, ".0f"),
            *(_megabytes(row["device_megabytes"]), both(row["peak_mb"], 1, ".0f")),
        )
        found.append((_RATIOS, cells))
    if "resting_megabytes" in row:
        names = "device_megabytes", "resting_megabytes"
        memory = (_megabytes(row[name]) for name in names)
        found.append((_MEMORY, (row["what"], *memory)))
    if "step_seconds" in row:
        shares = {k: v for k, v in row.items() if k not in ("what", "step_seconds")}
        times = {f"{k}, ms": 1000 * v for k, v in row["step_seconds"].items()}
        numbers = (f"{v:.2f}" for v in (*shares.values(), *times.values()))
        found.append((("program", *shares, *times), (row["what"], *numbers)))
    return found


def _megabytes(pair: list[float | None]) -> str:
    return "" if None in pair else both(pair, 1, ".0f")


def _numbers(values: Any) -> str:
    return " / ".join(f"{value:.0e}" for value in values)


def _engine(about: dict[str, Any]) -> str:
    gpus = ", ".join(about.get("gpus", ())) or "no GPU"
    named = {k: v for k, v in about.items() if k not in ("gpus", "error")}
    said = ", ".join(f"{name} {value}" for name, value in named.items())
    return f"{said}; {gpus}" if named else _last_line(about["error"])


def _last_line(error: str) -> str:
    return error.strip().splitlines()[-1]
