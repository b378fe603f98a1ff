"""Runs the benchmarks: `python -m benchmarks --json FILE`."""

import argparse
import datetime
import importlib.util
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import keras_strategy
from benchmarks.comparisons import BACKENDS, COMPARISONS, Comparison
from benchmarks.paired_processes import measure_row, starter_for
from benchmarks.paired_timing import CPU
from benchmarks.tables import RATIO, comparisons_table, format_ratio, is_noisy

# How often a noisy row is measured at most.
ATTEMPTS = 3
# Not imported, because it would import a backend.
_KERAS = Path(importlib.util.find_spec("keras").origin).parent


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add("--json", metavar="FILE", help="where the rows are written")
    add("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    add("--aims", action="store_true", help="only rows that have an aim")
    add("--below", metavar="FILE", help="only rows that were below their aims there")
    add("--rounds", type=int, default=5, help="of both programs")
    add("--starts", type=int, default=1, help="of the processes, each with all rounds")
    add("--seconds", type=float, default=0.25, help="of a program's turn in a round")
    add("--only", default="", metavar="TEXT", help="only rows whose names contain it")
    add("--minutes", type=float, default=13.0, help="until noisy rows are left so")
    options = parser.parse_args()
    began = time.monotonic()
    rows, failed = _measure(options, began + 60 * options.minutes)
    print(RATIO, comparisons_table(rows), sep="\n\n")
    print(f"{len(rows)} rows in {time.monotonic() - began:.0f} s; failed: {failed}")
    if options.json:
        text = json.dumps({**_describe_machine(), "rows": rows}, indent=1)
        Path(options.json).write_text(text + "\n")
    return int(bool(failed))


def _measure(
    options: argparse.Namespace, until: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows, and the names of those that failed.

    Noisy ones are measured again when all are there, while there is time.
    """
    names = select_rows(options.backends, options.only, options.aims)
    if options.below:
        below = rows_below(json.loads(Path(options.below).read_text())["rows"])
        names = {key: name for key, name in names.items() if name in below}
    rows: dict[tuple[Comparison, str], dict[str, Any]] = {}
    failed = set()
    for attempt in range(ATTEMPTS):
        left = [k for k in names if attempt == 0 or k in rows and is_noisy(rows[k])]
        for (backend, workers), group in itertools.groupby(
            left, lambda key: (key[0].backend, key[0].workers)
        ):
            with starter_for(backend, workers) as starter:
                for key in group:
                    if attempt and time.monotonic() > until:
                        break
                    try:
                        turns = options.rounds, options.seconds, options.starts
                        row = measure_row(starter, *key, *turns)
                    except RuntimeError as error:  # the others are still measured
                        print(f"{names[key]}: {error}", file=sys.stderr)
                        failed.add(names[key])
                        continue
                    print(f"{names[key]}: {_format_row(row)}", flush=True)
                    rows[key] = min(row, rows.get(key, row), key=lambda r: r["noise"])
    return [rows[key] for key in names if key in rows], sorted(failed)


def select_rows(
    backends: Sequence[str], only: str = "", aims: bool = False
) -> dict[tuple[Comparison, str], str]:
    """Return the names that contain `only`, by the comparison and its case.

    If `aims`, only those of rows with an aim.
    """
    names = {
        (row, case): _name(row.backend, f"{case}: {row.name}", row.peer)
        for row in COMPARISONS
        for case in row.cases
        if row.backend in backends
        and (row.aim is not None or not aims)
        and (_KERAS / row.needs).exists()
    }
    return {key: name for key, name in names.items() if only in name}


def rows_below(rows: Sequence[dict[str, Any]]) -> set[str]:
    """Return the names of rows below their aims."""
    return {
        _name(row["backend"], row["case"], row["peer"])
        for row in rows
        if row["aim"] is not None and row["speeds"][CPU]["ratio"] < row["aim"]
    }


def _name(backend: str, case: str, peer: str) -> str:
    return f"{backend}: {case} / {peer}"


def _format_row(row: dict[str, Any]) -> str:
    speeds = row["speeds"].items()
    ratios = ", ".join(f"{format_ratio(speed)} {unit}" for unit, speed in speeds)
    machine = f"others {row['others']:.1%}, idle {row['idle']:.1%}"
    return f"{ratios}; {machine}{', noisy' if is_noisy(row) else ''}"


def _describe_machine() -> dict[str, Any]:
    """Return what a result belongs to: versions, the date and the machine."""
    packages = ("keras", "jax", "torch", "tensorflow-cpu", "tensorflow")
    return {
        "version": keras_strategy.__version__,
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "packages": {
            found.metadata["Name"]: found.version
            for name in packages
            for found in metadata.distributions(name=name)
        },
    }


if __name__ == "__main__":
    sys.exit(main())
