"""The table of tests that `make test` leaves out is current."""

import pathlib

import pytest

from tests.full_suite import KEPT, ON_ONE, find_full

TESTS = pathlib.Path(__file__).parent


@pytest.mark.parametrize("beginning", KEPT)
def test_beginning_names_existing_tests(beginning):
    path, _, test = beginning.partition("::")
    name = test.partition("[")[0]
    assert (TESTS / path).exists()
    assert not name or f"def {name}" in (TESTS / path).read_text()


def test_find_full_keeps_evenly_spaced_tests():
    names = [f"faults/test_faults.py::test_fault[{i}]" for i in range(7)]
    assert find_full(names, "jax") == [1, 2, 4, 5]
    assert find_full(["core/test_run.py::test_reduce"], "jax") == []


def test_slow_tests_run_on_one_backend():
    names = [name for names in ON_ONE.values() for name in names]
    assert len(names) == len(set(names))
    for name in names:
        path, _, test = name.partition("::")
        assert f"def {test}(" in (TESTS / path).read_text(), name
    backend, other = "jax", "torch"
    slow = ON_ONE[backend][0]
    assert find_full([slow, f"{slow}[2]"], backend) == []
    assert find_full([slow, f"{slow}[2]"], other) == [0, 1]
