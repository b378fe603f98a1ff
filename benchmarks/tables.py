"""Markdown tables of figures."""

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.paired_timing import CPU, WALL

RATIO = (
    "A ratio is our steps per second divided by the peer's, in seconds of wall time or "
    "of CPU time: the median over neighbouring turns, with quartiles. Above 1, ours is "
    "faster."
)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def comparisons_table(rows: list[dict[str, Any]]) -> str:
    """Return the table of rows as `python -m benchmarks --json` writes them.

    The last columns have ours / the peer's. A row that stayed noisy has a `~`, and one
    of several starts of its processes their number.
    """
    head = (
        *("backend", "case: ours", "peer", "ratio of steps/s", "of steps/CPU-s", "aim"),
        *("once per call, ms", "first step, s", "peak memory, MB"),
    )
    return markdown(head, map(_cells, rows))


def format_ratio(speed: dict[str, Any]) -> str:
    low, high = speed["spread"]
    return f"{speed['ratio']:.2f} ({low:.2f} to {high:.2f})"


def format_pair(pair: Sequence[float | None] | None, factor: float, form: str) -> str:
    """Return "ours / the peer's", or nothing if one is not known."""
    if pair is None or None in pair:
        return ""
    return " / ".join(format(factor * value, form) for value in pair)


def is_noisy(row: dict[str, Any]) -> bool:
    return row.get("noise", 0) > 1


def _cells(row: dict[str, Any]) -> Sequence[str]:
    starts = row.get("starts", 1)
    suffix = f", {starts} starts" if starts > 1 else ""
    return (
        row["backend"],
        row["case"] + suffix + (" ~" if is_noisy(row) else ""),
        row["peer"],
        *(format_ratio(row["speeds"][unit]) for unit in (WALL, CPU)),
        "" if row["aim"] is None else str(row["aim"]),
        format_pair(row.get("once_seconds"), 1000, ".0f"),
        format_pair(row.get("first_step_seconds"), 1, ".1f"),
        format_pair(row.get("peak_mb"), 1, ".0f"),
    )
