"""Several workers train as one device does."""

import keras
import numpy as np
import pytest

from tests.workers import jobs

TOLERANCE = 1e-5


def equal(one, other, tolerance=TOLERANCE):
    """Whether structures of arrays agree, in relation to 1 or to their size."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return all(equal(one[key], other[key], tolerance) for key in one)
    if isinstance(one, list | tuple):
        assert len(one) == len(other)
        return all(equal(a, b, tolerance) for a, b in zip(one, other, strict=True))
    np.testing.assert_allclose(
        np.asarray(one), np.asarray(other), rtol=tolerance, atol=tolerance
    )
    return True


@pytest.fixture(scope="module")
def fit_arrays_alone():
    return jobs.fit_arrays(alone=True)


def test_fit_equals_one_device(workers, fit_arrays_alone):
    results = workers.run(jobs.fit_arrays)
    for result in results:
        assert equal(result, fit_arrays_alone)
    # The workers do not drift apart by rounding either.
    for a, b in zip(results[0]["weights"], results[1]["weights"], strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_batch_of_fewer_rows_than_workers(two_workers):
    arguments = {"rows": 9, "batch_size": 4}  # 4, 4 and 1
    expected = jobs.fit_arrays(alone=True, **arguments)
    for result in two_workers.run(jobs.fit_arrays, **arguments):
        assert equal(result, expected)


def test_the_statistics_of_the_global_batch(two_workers):
    expected = jobs.batch_statistics(alone=True)
    for result in two_workers.run(jobs.batch_statistics):
        assert equal(result, expected)


def test_a_loop_of_ones_own_equals_one_device(two_workers):
    # There each replica of several workers draws its own numbers.
    rate = 0.0 if keras.backend.backend() == "tensorflow" else 0.3
    expected = jobs.custom_loop(alone=True, rate=rate)
    for result in two_workers.run(jobs.custom_loop, rate=rate):
        assert equal(result, expected)


def test_workers_whose_data_ends_early(two_workers):
    results = two_workers.run(jobs.epochs_of_different_length)
    assert [result["steps"] for result in results] == [2, 2]
    assert equal(results[0]["weights"], results[1]["weights"], 0)
    assert "worker 1" in results[0]["warned"][0]


def test_workers_that_read_different_batches(two_workers):
    for said in two_workers.run(jobs.different_batches):
        assert "worker 0: 8, worker 1: 9" in said
