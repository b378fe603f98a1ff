"""What the table of comparisons names is there."""

import importlib

import keras
import pytest

from benchmarks.cases import CASES
from benchmarks.comparisons import COMPARISONS

OF_BACKEND = [c for c in COMPARISONS if c.backend == keras.backend.backend()]


@pytest.mark.parametrize("comparison", OF_BACKEND, ids=lambda c: f"{c.name}, {c.peer}")
def test_comparison_programs_run(comparison):
    for program in comparison.programs:
        module, _, function = program.partition(":")
        found = importlib.import_module(f"benchmarks.{module}")
        assert callable(getattr(found, function))
    assert set(comparison.cases) <= {case.name for case in CASES}
