"""Peers of the torch backend."""

from benchmarks.comparisons import Comparison

COMPARISONS: tuple[Comparison, ...] = ()
