"""Subcommand `compare`: the first difference of two models' fingerprints."""

import argparse
import itertools
import json
import pathlib
import sys
from typing import Any


def main(options: argparse.Namespace) -> int:
    try:
        first, second = map(_read, options.files)
        difference = find_difference(first, second)
    except ValueError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    conditions = first["conditions"].keys() | second["conditions"].keys()
    for name in sorted(conditions):
        values = [report["conditions"].get(name) for report in (first, second)]
        if values[0] != values[1]:
            print(f"Other {name}: {values[0]} and {values[1]}.")
    print(difference or f"Equal: {first['sha256']}")
    return int(difference is not None)


def find_difference(first: dict[str, Any], second: dict[str, Any]) -> str | None:
    """Return a sentence on the first variable that differs; None if all are equal."""
    if first["sha256"] == second["sha256"]:
        return None
    pairs = itertools.zip_longest(first["variables"], second["variables"])
    for number, (one, other) in enumerate(pairs):
        if one is None or other is None:
            counts = [len(report["variables"]) for report in (first, second)]
            return f"The models have {counts[0]} and {counts[1]} variables."
        name = f"variable {number}, '{one['path']}'"
        if one["path"] != other["path"]:
            name += f" and '{other['path']}'"
        for what in ("shape", "dtype"):
            if one[what] != other[what]:
                values = f"{one[what]} and {other[what]}"
                return f"The first difference is the {what} of {name}: {values}."
        if one["sha256"] != other["sha256"]:
            return f"The first difference is in the bits of {name}."
    raise ValueError("The reports have the same variables and differ in their digests.")


def _read(file: str) -> dict[str, Any]:
    try:
        report = json.loads(pathlib.Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    keys = {"sha256", "variables", "conditions"}
    if not isinstance(report, dict) or not keys <= report.keys():
        raise ValueError(
            f"{file} is not a report of a fingerprint, as `keras-strategy run "
            "--fingerprint` and `keras_strategy.fingerprint(model).save(path)` write."
        )
    return report
