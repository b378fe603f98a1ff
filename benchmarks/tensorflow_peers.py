"""Peers of the tensorflow backend."""

from benchmarks.comparisons import Comparison

COMPARISONS: tuple[Comparison, ...] = ()
