"""How often workers ask each other, which takes a journey to the chief and back."""

import keras
import numpy as np
import pytest

from keras_strategy.testing import WorkerRunner
from tests.distributed import jobs

BACKEND = keras.backend.backend()


@pytest.fixture(scope="module")
def results(starter):
    with WorkerRunner(2, timeout_seconds=300, starter=starter) as runner:
        return runner.run(jobs.rounds)


@pytest.mark.full(keep_on="torch")
@pytest.mark.needs_patch("Layer._track_variables", backend="torch")
def test_scope_compares_variables_once(results):
    for result in results:
        # On TensorFlow a variable gets the chief's value when it is made.
        native = BACKEND == "tensorflow"
        assert len(result["the same values"]) == (0 if native else 1)
        # Once more to compare the shapes, before the chief's values travel.
        assert len(result["other values"]) == (0 if native else 2)
        assert result["variables"] == [6, 7]
        for own, chiefs in zip(result["weights"], results[0]["weights"], strict=True):
            np.testing.assert_array_equal(own, chiefs)
        assert result["losses"] == results[0]["losses"]
    assert results[1]["read"] == 5


def test_known_function_needs_no_comparison(results):
    for result in results:
        first, *again, other, last = result["steps"]
        assert again == [[], []]
        assert last == []
        if BACKEND != "jax":
            assert first == other == []
            continue
        # A program is agreed on before it is compiled. Batches that no one program
        # serves are known to be so by all workers.
        assert first == ["strategy.run"]
        assert "strategy.run" not in other


def test_batch_signature_is_compared_once(results):
    for result in results:
        assert result["a batch"] == ["the start of train_on_batch"]


def test_stopping_together_reads_no_batch_logs(results):
    for result in results:
        alone, with_epochs, with_batches = result["told"]
        assert alone == (0, 0)
        # Callbacks of the user's own may stop after a batch. No batch waits for it.
        assert with_epochs == (0, 0)
        assert with_batches == (3, 0)


def test_one_worker_reads_batch_logs(results):
    exchanges = 1 if BACKEND == "torch" else 0
    assert results[0]["read by one"] == ([], exchanges)
    losses, exchanged = results[1]["read by one"]
    assert exchanged == exchanges
    assert len(losses) == 6 and np.all(np.isfinite(losses))


@pytest.mark.full(keep_on="tensorflow")
def test_diverging_workers_are_reported(starter, tmp_path):
    environment = {"KERAS_STRATEGY_TIMEOUT_SECONDS": "15"}
    with WorkerRunner(
        2, timeout_seconds=280, environment=environment, starter=starter
    ) as runner:
        runner.start(jobs.different_programs, str(tmp_path))
        ends = runner.wait()
    for end in ends:
        assert end.exit_status != 0
    said = "All workers must make the same calls in the same order."
    assert any(said in end.output for end in ends)
    if BACKEND == "jax":
        assert "worker 0: `strategy.run(step)`" in ends[0].output + ends[1].output
