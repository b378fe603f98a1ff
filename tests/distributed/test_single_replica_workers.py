"""A replica that is the only one of its process; on torch it writes at once."""

import keras
import numpy as np
import pytest

from keras_strategy.testing import WorkerFailed, WorkerRunner
from tests.distributed import single_replica_jobs as jobs
from tests.distributed.test_training import equal

BACKEND = keras.backend.backend()
ON_TORCH = BACKEND == "torch"
for_torch = pytest.mark.skipif(not ON_TORCH, reason="elsewhere a step is compiled")


# What one process alone comes to as well.
TRAINED = [jobs.adversaries]
if ON_TORCH:
    TRAINED += [jobs.a_cleared_session, jobs.kept_gradients]
WORKED = [*TRAINED, jobs.values_of_runs]
if BACKEND != "tensorflow":  # where a run that fails says that this stays assigned
    WORKED.append(jobs.runs_that_fail)
if ON_TORCH:
    WORKED += [jobs.steps_that_fail, jobs.sums_of_all_kinds, jobs.rows_that_are_read]


@pytest.fixture(scope="module")
def results(in_turns):
    """What each of two workers returns, by the name of the job."""
    return in_turns(**{job.__name__: (job, {}) for job in WORKED})[0]


@pytest.mark.full(keep_on="torch")
@pytest.mark.skipif(
    BACKEND == "tensorflow", reason="a run that fails says that this stays assigned"
)
def test_failed_run_changes_nothing(results):
    for result in results["runs_that_fail"]:
        boom, *others = result["said"]
        assert boom == "boom"
        if ON_TORCH:
            # As in replicas that are not the only one of their process.
            assert "create a variable while in a stateless scope" in others[0]
        for before, after in zip(result["before"], result["after"], strict=True):
            np.testing.assert_array_equal(before, after)
        kept, kept_after = result["kept"]
        assert kept == kept_after
        returned, still, total = result["returned"]
        assert (returned, still, total) == (2.0, 2.0, 4.0)


def test_returned_values_do_not_change(results):
    for result in results["values_of_runs"]:
        assert set(result["kept"].values()) == {2.0}
        assert (result["total"], result["part"]) == (4.0, 2.0)
        assert result["written"] == 6.0
        assert not result["turn"]  # nothing that is set on a layer is noted any more


def test_first_read_of_foreign_on_read_sum(starter):
    with WorkerRunner(2, timeout_seconds=300, starter=starter) as runner:
        if BACKEND == "tensorflow":  # it cannot be split any more
            with pytest.raises(WorkerFailed, match="'foreign:0' was created outside"):
                runner.run(jobs.foreign_sums_that_are_read)
            return
        for result in runner.run(jobs.foreign_sums_that_are_read):
            assert result == [7.0, 2.5, 5.0]  # each has half of the 5, and adds 1


@pytest.mark.full(keep_on="torch")
@pytest.mark.parametrize("job", TRAINED, ids=lambda job: job.__name__)
def test_workers_equal_one_process(job, results):
    expected = job(alone=True)
    for result in results[job.__name__]:
        assert equal(result, expected)


@for_torch
def test_failing_steps_change_nothing(results):
    for result in results["steps_that_fail"]:
        before, after, sums = result["said"]
        assert before[0] == "before" and after[0] == "after"
        assert not any("partly updated" in note for note in before)
        assert any("partly updated" in note for note in after)
        assert "had read it" in sums[0]
        # What comes before the optimizer is undone; what comes after it too.
        assert result["steps"] == [1.0] * 4


@for_torch
def test_all_kinds_of_reductions(results):
    thirds = np.full((2,), 1 / 3)
    for whole, mixed, alike in results["sums_of_all_kinds"]:
        assert equal(whole, [[4], [4]], 1e-7)
        assert equal(mixed, [[1.0], thirds] * 2, 1e-7)
        assert equal(alike, [thirds] * 4, 1e-7)


@for_torch
def test_worker_reads_its_local_rows(results):
    results = results["rows_that_are_read"]
    # Of 29 rows by 8, the last batch has 3 for the first worker and 2 for the second.
    for own, read in zip((15, 14), results, strict=True):
        assert read == {
            "built": 8 + own,  # Keras builds a model with a whole batch
            "fit": 2 * own,
            "in order": own,
            "evaluate": own,
            "predict": own,
        }
