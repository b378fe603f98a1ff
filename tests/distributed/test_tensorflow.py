"""What is TensorFlow's alone where there are several workers."""

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("Tests of the TensorFlow adapter", allow_module_level=True)

from keras_strategy.testing import WorkerRunner
from tests.distributed import tensorflow_jobs as jobs
from tests.distributed.test_training import equal


@pytest.mark.full
def test_fit_in_many_ways_equals_one_device(starter):
    """On 4 replicas of 2 workers; three workers fit arrays in test_training.py."""
    with WorkerRunner(2, 2, timeout_seconds=300, starter=starter) as runner:
        results = runner.run(jobs.fit_in_many_ways)
    alone = jobs.fit_in_many_ways(alone=True)
    for result in results:
        assert equal(result, alone)


@pytest.fixture(scope="module")
def results(in_turns):
    """What each of two workers returns, and what they print."""
    return in_turns(
        shuffled=(jobs.shuffle_without_a_seed, {}),
        variables=(jobs.variables_and_dtypes, {}),
        gradient=(jobs.gradient_through_collectives, {}),
        reduced=(jobs.reduce_after_run, {}),
        different=(jobs.different_values_in_a_run, {}),
        gradients=(jobs.gradients_of_other_shapes, {}),
    )


def test_workers_shuffle_alike(results):
    (one, drawn), (other, _) = results[0]["shuffled"]
    np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(np.sort(one[:, 0]), np.arange(40))
    assert (np.diff(one[:, 0]) < 0).any()
    # Of the second, one device would draw once more in each epoch.
    assert drawn == [10, 10]
    outputs = results[1]
    assert [said.count("data has an unknown length") for said in outputs] == [1, 0]


def test_collectives_in_loops(starter):
    """On 4 replicas of 2 workers; other collectives of three are in their tests."""
    expected = jobs.loops_in_functions(alone=True)
    with WorkerRunner(2, 2, timeout_seconds=300, starter=starter) as runner:
        for result in runner.run(jobs.loops_in_functions):
            assert equal(result, expected)


def test_variables_of_all_dtypes(results):
    results = results[0]["variables"]
    for result in results:
        assert result["sum"] == 11
        assert result["mean"] == 5.5
        assert result["only_first_replica"] == 5
        assert result["native"] == 2
        np.testing.assert_array_equal(result["seeded"], results[0]["seeded"])
        assert result["bool"] == ("bool", [1] * 4, None)
        for dtype in ("int8", "uint32", "uint64", "bfloat16", "complex64"):
            assert result[dtype] == (dtype, [1] * 4, 2)
        for (_, dtype), total in result["scalars"].items():
            one, other = (np.asarray(x, dtype) for x in jobs.SCALARS[dtype])
            np.testing.assert_array_equal(total, (one + other).item())
        # A scalar travels in the collective that compares it.
        assert result["collectives"] == 4


def test_reduce_after_run(results):
    assert results[0]["reduced"] == [jobs.REDUCED_AFTER_RUN] * 2


def test_gradient_through_collectives(results):
    # Each of 2 replicas has 4 + 4 and 2 + 2: twice the derivatives 2 * 2 and 1.
    for gradients in results[0]["gradient"]:
        assert gradients == [10.0]


def test_differing_values_in_run_are_reported(results):
    for shapes, rows, calls, dtypes, ranks in results[0]["different"]:
        assert "worker 0: (2,) float32, worker 1: (3,) float32" in shapes
        assert "other than axis 0" in rows
        assert "worker 0: (2, 2) float32, worker 1: (2, 3) float32" in rows
        assert "worker 0: `all_gather`, worker 1: `all_reduce`" in calls
        assert "worker 0: () float32, worker 1: () int64" in dtypes
        assert "worker 0: () float32, worker 1: (1,) float32" in ranks


def test_differing_gradient_shapes_are_reported(results):
    for said in results[0]["gradients"]:
        assert "`optimizer.apply` needs values whose dtypes and sizes" in said
        assert "worker 0: (2, 3) float32, worker 1: (6,) float32" in said
    # Of what TensorFlow listens to, one of them speaks, in one line.
    outputs = results[1]
    assert [said.count("listen on all interfaces") for said in outputs] == [1, 0]


def test_strategy_created_too_late_is_refused(two_workers):
    for said in two_workers.run(jobs.after_other_use):
        assert "at the start of the program" in said
