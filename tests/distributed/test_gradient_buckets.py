"""Gradients that leave during backward are summed exactly, or made anew."""

import keras
import pytest

import keras_strategy as ks
from keras_strategy.testing import WorkerRunner

if keras.backend.backend() != "torch":
    pytest.skip("for the torch backend", allow_module_level=True)

from tests.distributed import gradient_bucket_jobs as jobs  # noqa: E402
from tests.distributed.test_training import equal  # noqa: E402

# True where gradients that leave early count, and where some leave in vain.
KINDS = {
    # With a replica without rows, and a layer that is frozen later.
    "keras": (True, False),
    "added": (True, False),  # regularisers and `add_loss`, with accumulation
    "two optimizers": (True, False),
    "branches": (True, False),  # each has buckets of its own
    "twice": (False, True),  # two backward passes
    "halved": (False, True),
    "one halves": ((True, False), (False, True)),  # on the second worker alone
    "others": (True, True),  # in every third step
    "delayed": (True, True),  # where the next batch has another weight
}


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("kind", KINDS)
def test_workers_equal_one_process(kind, two_workers):
    if kind == "delayed":
        # One device has no weights of rows that could be those of another step.
        expected, seen = two_workers.run(jobs.trained, kind, in_pieces=False)[0]
        assert not any(seen.values())
    else:
        expected, _ = jobs.trained(kind, alone=True)
    counts = KINDS[kind]
    for rank, (result, seen) in enumerate(two_workers.run(jobs.trained, kind)):
        assert equal(result, expected), seen
        counted = bool(seen["early"]), bool(seen["in vain"])
        assert counted == (counts[rank] if kind == "one halves" else counts), seen


def test_loop_with_failing_steps(two_workers):
    expected, _ = jobs.runs(alone=True)
    for result, seen in two_workers.run(jobs.runs):
        assert equal(result, expected), seen
        assert seen["early"] and seen["in vain"]


def test_gradients_of_other_variables_are_refused(two_workers, two):
    name = "optimizer.apply without gradients of variables [1]"
    assert f"0: {name}" in jobs.different_gradients(two)
    for said in two_workers.run(jobs.different_gradients):
        assert f"worker 0: `{name}`" in said


def test_sparse_gradients(two_workers, mirrored):
    expected = jobs.sparse(ks.OneDeviceStrategy("cpu:0"))
    assert equal(jobs.sparse(mirrored(3)), expected)
    for result in two_workers.run(jobs.sparse):
        assert equal(result, expected)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("killed", "worker 1 disconnected without notice"),
        ("raises", "worker 1 raised ValueError: the disk is full"),
    ],
)
def test_worker_ending_in_backward_is_named(how, said, starter):
    # Who does not notice waits for 600 s.
    with WorkerRunner(2, timeout_seconds=280, starter=starter) as runner:
        runner.start(jobs.end_in_backward, how)
        other, _ = runner.wait()
    assert other.exit_status != 0
    assert said in other.output
