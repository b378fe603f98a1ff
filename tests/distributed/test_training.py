"""Several workers train as one device does."""

import keras
import numpy as np
import pytest

from keras_strategy.testing import WorkerRunner
from tests.distributed import jobs

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


# By batches of 8. Of the last one some of 3 workers have 2 rows and one has 1; of 4
# replicas in 2 workers the first has the only row, and one worker has none. There they
# take a step of 5 rows and evaluate by as many.
@pytest.mark.full(keep=1)
@pytest.mark.parametrize(
    ("count", "devices", "rows"), [(3, 1, 29), (2, 2, 25)], ids=["3x1", "2x2"]
)
def test_fit_equals_one_device(count, devices, rows, starter):
    with WorkerRunner(count, devices, timeout_seconds=300, starter=starter) as runner:
        results = runner.run(jobs.fit_arrays, rows=rows)
    alone = jobs.fit_arrays(alone=True, rows=rows)
    for result in results:
        assert equal(result, alone)
    # The workers do not drift apart by rounding either.
    for a, b in zip(results[0]["weights"], results[1]["weights"], strict=True):
        np.testing.assert_array_equal(a, b)


# What two workers do in turns, with what arguments.
CALLS: dict[str, dict] = {
    "batch_statistics": {},
    # On TensorFlow each replica of several workers draws its own numbers.
    "custom_loop": {"rate": 0.0 if keras.backend.backend() == "tensorflow" else 0.3},
    "epochs_of_different_length": {},
    "different_batches": {},
    "users_functions": {},
}


@pytest.fixture(scope="module")
def results(in_turns):
    """What each of two workers returns, by function."""
    calls = {name: (getattr(jobs, name), CALLS[name]) for name in CALLS}
    return in_turns(**calls)[0]


@pytest.mark.full(keep_on="jax")
@pytest.mark.parametrize("name", ["batch_statistics", "custom_loop", "users_functions"])
def test_all_entry_points_equal_one_device(name, results):
    expected = getattr(jobs, name)(alone=True, **CALLS[name])
    for result in results[name]:
        assert equal(result, expected)


@pytest.mark.needs_patch("TorchEpochIterator._get_iterator", backend="torch")
@pytest.mark.needs_patch("TFEpochIterator._get_iterator", backend="tensorflow")
def test_data_ending_early_is_reported(results):
    results = results["epochs_of_different_length"]
    assert [result["steps"] for result in results] == [2, 2]
    assert equal(results[0]["weights"], results[1]["weights"], 0)
    assert "worker 1" in results[0]["warned"][0]


def test_differing_batches_are_reported(results):
    for said in results["different_batches"]:
        assert "worker 0: 8, worker 1: 9" in said
