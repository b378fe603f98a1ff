"""Versions with which the test suite has run: docs/versions.md has the results."""

import platform
import re

_TESTED = {
    "python": ("3.11", "3.13"),
    "keras": ("3.13", "3.16"),
    "jax": ("0.10", "0.12"),
    "torch": ("2.13", "2.14"),
    "tensorflow": ("2.21", "2.22"),
}


def compare(keras: str, backend: str, version: str) -> tuple[str, list[str]]:
    """Return the tested versions, and the installed ones that are not among them."""
    tested, untested = [], []
    installed = {"python": platform.python_version(), "keras": keras, backend: version}
    for name, found in installed.items():
        first, last = _TESTED.get(name, ("0", "0"))
        tested.append(f"{name} {first} to {last}")
        if not _numbers(first) <= _numbers(found) <= _numbers(last):
            untested.append(f"{name} {found}")
    return ", ".join(tested), untested


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]
