"""Selection of the tests of `make test-full` by the mark `full`.

Pytest selects by the mark `full` alone, so `select_full` resolves its arguments.
"""

import collections
from collections.abc import Iterable

import pytest


def select_full(items: Iterable[pytest.Item], backend: str) -> None:
    """Leave the mark `full` on the tests that `make test` does not run on a backend.

    Of the tests that share `full(keep=6)`, six that are evenly spaced lose it. With
    `full(keep_on="jax")`, all tests have it on the other backends.
    """
    groups = collections.defaultdict(list)
    for item in items:
        for node, mark in item.iter_markers_with_node("full"):
            place = node.nodeid.partition("[")[0]
            groups[place, *mark.kwargs.items()].append(item)
    full = []
    for (_, *arguments), group in groups.items():
        full += find_full(group, backend, **dict(arguments))
    for item in items:
        for node in item.listchain():
            node.own_markers[:] = [m for m in node.own_markers if m.name != "full"]
    for item in full:
        item.add_marker(pytest.mark.full)


def find_full(
    items: list, backend: str, *, keep: int | None = None, keep_on: str | None = None
) -> list:
    """Return the items of a mark that `make test` does not run on a backend."""
    if keep_on not in (None, backend) or (keep, keep_on) == (None, None):
        return items
    stride = -(-len(items) // keep) if keep else 1
    return [item for i, item in enumerate(items) if i % stride]
