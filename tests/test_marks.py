"""The marks of this suite select the tests that they describe."""

import pytest

from tests.marks import find_full


def test_full_keeps_evenly_spaced_tests():
    assert find_full(list(range(7)), "jax", keep=3) == [1, 2, 4, 5]
    assert find_full(list(range(7)), "jax") == list(range(7))


def test_slow_tests_run_on_one_backend():
    assert find_full([0, 1], "jax", keep_on="jax") == []
    assert find_full([0, 1], "torch", keep_on="jax") == [0, 1]
    assert find_full([0, 1], "jax", keep=1, keep_on="jax") == [1]


def test_misspelled_argument_of_mark_is_refused():
    with pytest.raises(TypeError, match="keeps"):
        find_full([0], "jax", keeps=1)
