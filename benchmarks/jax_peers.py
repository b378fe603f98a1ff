"""Peers of the jax backend."""

from benchmarks.comparisons import Comparison

COMPARISONS: tuple[Comparison, ...] = ()
