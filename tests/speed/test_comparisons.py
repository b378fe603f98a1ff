"""What the table of comparisons names is there."""

import importlib
import pathlib

import keras
import pytest

from benchmarks.__main__ import wanted
from benchmarks.cases import CASES
from benchmarks.comparisons import BACKENDS, COMPARISONS

OF_BACKEND = [c for c in COMPARISONS if c.backend == keras.backend.backend()]


@pytest.mark.parametrize("comparison", OF_BACKEND, ids=lambda c: f"{c.name}, {c.peer}")
def test_comparison_programs_run(comparison):
    for program in comparison.programs:
        module, _, function = program.partition(":")
        found = importlib.import_module(f"benchmarks.{module}")
        assert callable(getattr(found, function))
    assert set(comparison.cases) <= {case.name for case in CASES}


def test_rows_that_need_another_keras_are_left_out():
    files = pathlib.Path(keras.__file__).parent
    measured = {comparison for comparison, _ in wanted(BACKENDS)}
    for comparison in COMPARISONS:
        assert (comparison in measured) == (files / comparison.needs).exists()
    assert any(comparison.needs for comparison in COMPARISONS)
