"""Training goes on when workers fail and join: real processes of the launcher."""

import os
import re
import signal

import keras
import pytest

from tests.distributed import elastic_program
from tests.distributed.elastic_program import (
    largest_difference,
    read_batches,
    read_weights,
    start,
    wait_for_batch,
)

pytestmark = pytest.mark.full

EPOCHS = 12  # a minute of slow batches: a worker needs long to start on a busy machine


@pytest.fixture
def run(tmp_path):
    """Start the program, and kill it at the end of the test."""
    processes = []

    def start_here(options, *arguments):
        processes.append(start(tmp_path, options, *arguments))
        return processes[-1]

    yield start_here
    for process in processes:
        process.terminate()
        process.wait()


def expected_weights(folder, train=elastic_program.train):
    """Return the variables after the same training in this process alone."""
    folder.mkdir()
    train(folder, EPOCHS, 0.0)
    (weights,) = read_weights(folder)
    return weights


def test_training_goes_on_when_workers_fail_and_join(tmp_path, run):
    """One worker fails before it connects, and one is killed in a step."""
    options = ["--workers", "3", "--min-workers", "1", "--max-restarts", "2"]
    process = run(options, "--epochs", EPOCHS, "--seconds", 0.5, "--fail-first", 1)
    joined = wait_for_batch(tmp_path, process, lambda batch: batch.workers == 3)
    killed = joined.pid
    os.kill(killed, signal.SIGKILL)

    # Also of the two that trained first: one may not have written a batch of three.
    before = {b.pid for b in read_batches(tmp_path)}

    def is_later(batch):
        is_smaller = batch.time > joined.time and batch.workers == 2
        return batch.pid not in before or is_smaller

    after = wait_for_batch(tmp_path, process, is_later)
    (tmp_path / "fast").touch()
    assert process.wait(timeout=240) == 0, (tmp_path / "output").read_text()
    output = (tmp_path / "output").read_text()
    sizes = list(map(int, re.findall(r"(\d) of 3 workers train", output)))
    if keras.backend.backend() == "torch":
        assert sizes[:4] == [3, 2, 3, 2], output
        assert after.pid in before - {killed}
    else:  # they connect once in a process
        assert sizes == [3, 3, 3], output
        assert after.pid not in before
    weights = read_weights(tmp_path)
    assert len(weights) == sizes[-1]
    expected = expected_weights(tmp_path / "alone")
    for values in weights:
        assert largest_difference(values, expected) < 2e-5


def test_sigterm_ends_one_worker_after_a_save(tmp_path, run):
    options = ["--workers", "2", "--min-workers", "1"]
    process = run(options, "--epochs", EPOCHS, "--seconds", 0.5)
    pid = wait_for_batch(tmp_path, process, lambda batch: batch.workers == 2).pid
    os.kill(pid, signal.SIGTERM)
    wait_for_batch(tmp_path, process, lambda batch: batch.workers == 1)
    (tmp_path / "fast").touch()
    status = process.wait(timeout=240)
    output = (tmp_path / "output").read_text()
    assert "was preempted (exit status 75). It is not started again." in output
    assert status == 0, output
    assert "1 of 2 workers train" in output
    (weights,) = read_weights(tmp_path)
    expected = expected_weights(tmp_path / "alone")
    assert largest_difference(weights, expected) < 2e-5
    assert read_batches(tmp_path)[-1].workers == 1


def test_custom_loop_goes_on_with_a_worker_that_joins(tmp_path, run):
    options = ["--workers", "2", "--min-workers", "1", "--max-restarts", "1"]
    process = run(
        options, "--loop", "--epochs", EPOCHS, "--seconds", 0.5, "--fail-first", 1
    )
    first = wait_for_batch(tmp_path, process, lambda batch: True)
    wait_for_batch(tmp_path, process, lambda batch: batch.workers == 2)
    (tmp_path / "fast").touch()
    assert process.wait(timeout=240) == 0, (tmp_path / "output").read_text()
    batches = read_batches(tmp_path)
    if keras.backend.backend() == "torch":  # alone at first
        assert first.workers == 1 and first.pid == batches[0].pid
        # No step was lost or repeated.
        assert sum(batch.pid == first.pid for batch in batches) == 11 * EPOCHS
    weights = read_weights(tmp_path)
    assert len(weights) == 2
    expected = expected_weights(tmp_path / "alone", elastic_program.train_in_a_loop)
    for values in weights:
        assert largest_difference(values, expected) < 2e-5
