"""What the table of comparisons names is there."""

import inspect
import pathlib

import keras
import pytest

from benchmarks.__main__ import select_rows
from benchmarks.cases import CASES
from benchmarks.comparisons import BACKENDS, COMPARISONS
from benchmarks.program_process import find_function

pytestmark = pytest.mark.full

OF_BACKEND = [c for c in COMPARISONS if c.backend == keras.backend.backend()]


@pytest.mark.parametrize("comparison", OF_BACKEND, ids=lambda c: f"{c.name}, {c.peer}")
def test_comparison_programs_exist(comparison):
    for program in comparison.ours, comparison.theirs:
        found = find_function(f"programs.{program.function}")
        inspect.signature(found).bind(CASES[comparison.cases[0]], **program.options)
    assert set(comparison.cases) <= CASES.keys()


def test_rows_that_need_another_keras_are_left_out():
    files = pathlib.Path(keras.__file__).parent
    measured = {comparison for comparison, _ in select_rows(BACKENDS)}
    for comparison in COMPARISONS:
        assert (comparison in measured) == (files / comparison.needs).exists()
    assert any(comparison.needs for comparison in COMPARISONS)
