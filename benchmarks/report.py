"""The rows of a run, as a table for people."""

from typing import Any

from benchmarks.paired_timing import CPU, WALL

RATIO = (
    "A ratio is our steps per second divided by the peer's, in seconds of wall time or "
    "of CPU time: the median over neighbouring turns, with quartiles. Above 1, ours is "
    "faster."
)
HEAD = (
    *("backend", "case: ours", "peer", "ratio of steps/s", "of steps/CPU-s", "aim"),
    *("once per call, ms", "first step, s", "peak memory, MB"),
)


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table with the quartiles of each comparison's ratios.

    The last columns have ours / the peer's. A row that stayed noisy has a `~`, and one
    of several starts of its processes their number.

    Args:
        rows: As `python -m benchmarks --json` writes them.
    """
    lines = [HEAD, ("---",) * len(HEAD), *map(_line, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def ratio(speed: dict[str, Any]) -> str:
    low, high = speed["spread"]
    return f"{speed['ratio']:.2f} ({low:.2f} to {high:.2f})"


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    speeds = row["speeds"]
    return (
        row["backend"],
        row["case"] + _starts(row) + (" ~" if row.get("noise", 0) > 1 else ""),
        row["peer"],
        ratio(speeds[WALL]),
        ratio(speeds[CPU]),
        "" if row["aim"] is None else str(row["aim"]),
        both(row.get("once_seconds"), 1000, ".0f"),
        both(row.get("first_step_seconds"), 1, ".1f"),
        both(row.get("peak_mb"), 1, ".0f"),
    )


def _starts(row: dict[str, Any]) -> str:
    starts = row.get("starts", 1)
    return f", {starts} starts" if starts > 1 else ""


def both(pair: list[float] | None, factor: float, form: str) -> str:
    return " / ".join(format(factor * value, form) for value in pair or ())
