"""Several processes on JAX; `tests/distributed` has what all backends share."""

import keras
import numpy as np
import pytest

from keras_strategy.cluster.process_exit import EXIT_OTHER_WORKER_FAILED
from keras_strategy.testing import WorkerRunner

if keras.backend.backend() != "jax":
    pytest.skip("tests of the JAX adapter", allow_module_level=True)

from tests.backends import jax_worker_jobs as jobs
from tests.distributed.jobs import in_turns


@pytest.fixture(scope="module", params=[2, 1], ids=["2x2", "2x1"])
def results(request, starter):
    """Return the results of two workers with a number of devices."""
    calls = {fn.__name__: (fn, {}) for fn in (jobs.uneven_rows, jobs.merged)}
    if request.param == 2:
        calls["keras_models"] = (jobs.keras_models, {})
    with WorkerRunner(2, request.param, timeout_seconds=300, starter=starter) as runner:
        found = runner.run(in_turns, calls)
    return {name: [of[name] for of in found] for name in calls}


@pytest.fixture
def two_workers(starter):
    with WorkerRunner(2, timeout_seconds=300, starter=starter) as runner:
        yield runner


def equal(one, other):
    keras.tree.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), one, other
    )


@pytest.mark.full(keep=1)
@pytest.mark.needs_patch(
    "keras.src.backend.jax.distribution_lib.distribute_tensor",
    backend="jax",
    case="2x1",
)
def test_replicas_of_different_shapes(results):
    results = results["uneven_rows"]
    n = sum(len(result["value"]) for result in results)
    ids = np.arange(n, dtype="float32")
    rows = np.repeat(ids, np.arange(n) + 1)[:, None] * np.ones(2, "float32")
    for result in results:
        equal(result["gathered"], rows)
        equal(result["mean"], rows.mean(axis=0))
        for value, every in zip(result["value"], result["rows"], strict=True):
            equal(value, 2 * rows.sum() + 2 * n)
            equal(every, rows)
        # Of the sum over the replicas of what each computed.
        assert result["variables"] == [ids.sum(), 5, ids.mean(), 6 + ids.sum()]
    parts = [part for result in results for part in result["parts"]]
    equal(parts, list(6 / n + ids))
    gradients = [g for result in results for g in result["gradient"]]
    equal(gradients, [n * 2 * (i + 1) * i + n for i in range(n)])


@pytest.mark.full(keep=1)
def test_run_accepts_functions_of_all_replicas(results):
    results = results["merged"]
    n = sum(len(result["local"]) for result in results)
    for result in results:
        last = (1 + 2 * n) * 4 + 2
        assert result["seen"] == [1 + n, 1 + 2 * n, (1 + 2 * n) * 2, last]
        assert all(part == last for part in result["local"])
        assert result["traced"] == 3
        assert result["mixed"] == [2 * n] * 3


@pytest.mark.parametrize("results", [2], ids=["2x2"], indirect=True)
def test_keras_reads_local_values(results):
    """One device each fits in the tests of `tests/distributed`."""
    expected = jobs.keras_models(alone=True)
    for result in results["keras_models"]:
        equal(result, expected)


def test_used_devices_are_refused(two_workers):
    two_workers.start(jobs.too_late)
    ends = two_workers.wait()
    for end in ends:
        assert "before the first tensor" in end.output
    # Each raises; who does so second may have been told of the first.
    assert {1} <= {end.exit_status for end in ends} <= {1, EXIT_OTHER_WORKER_FAILED}
