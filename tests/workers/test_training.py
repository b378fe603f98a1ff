"""Several workers train as one device does."""

import keras
import numpy as np
import pytest

from keras_strategy.testing import WorkerRunner
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


# What two workers do in turns, with what arguments.
CALLS: dict[str, dict] = {
    "fit_arrays": {"rows": 9, "batch_size": 4},  # 4, 4 and 1: fewer rows than workers
    "batch_statistics": {},
    # On TensorFlow each replica of several workers draws its own numbers.
    "custom_loop": {"rate": 0.0 if keras.backend.backend() == "tensorflow" else 0.3},
    "epochs_of_different_length": {},
    "different_batches": {},
}


@pytest.fixture(scope="module")
def results(starter):
    """What each of two workers returns, by function."""
    with WorkerRunner(2, timeout_seconds=300, starter=starter) as runner:
        of_workers = runner.run(jobs.in_turns, CALLS)
    return {name: [found[name] for found in of_workers] for name in CALLS}


@pytest.mark.parametrize("name", ["fit_arrays", "batch_statistics", "custom_loop"])
def test_what_one_device_comes_to(name, results):
    expected = getattr(jobs, name)(alone=True, **CALLS[name])
    for result in results[name]:
        assert equal(result, expected)


def test_workers_whose_data_ends_early(results):
    results = results["epochs_of_different_length"]
    assert [result["steps"] for result in results] == [2, 2]
    assert equal(results[0]["weights"], results[1]["weights"], 0)
    assert "worker 1" in results[0]["warned"][0]


def test_workers_that_read_different_batches(results):
    for said in results["different_batches"]:
        assert "worker 0: 8, worker 1: 9" in said
