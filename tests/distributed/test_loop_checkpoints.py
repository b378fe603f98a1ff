"""`CheckpointManager`: custom loops that stop in the middle of an epoch and resume."""

import keras
import pytest

import keras_strategy as ks
from keras_strategy.testing import WorkerRunner
from tests.distributed import loop_jobs
from tests.equality.compare import largest


def check_same_bits(uninterrupted, stopped, resumed):
    assert (uninterrupted["steps"], stopped["steps"]) == ((0, 12), (0, 7))
    assert resumed["steps"] == (6, 12)
    assert largest(uninterrupted["values"], resumed["values"]) == 0
    assert resumed["draws"] == uninterrupted["draws"][6:]


@pytest.mark.full(keep_on="jax")
def test_resumed_loop_ends_with_same_bits(two, tmp_path):
    saved = str(tmp_path / "stopped")
    check_same_bits(
        loop_jobs.train(str(tmp_path / "uninterrupted"), strategy=two),
        loop_jobs.train(saved, stop_at=7, strategy=two),
        loop_jobs.train(saved, seed=99, strategy=two),
    )


@pytest.mark.full(keep_on="tensorflow")
def test_resumed_loop_of_workers_ends_with_same_bits(starter, tmp_path):
    def run(folder, *arguments):
        with WorkerRunner(2, timeout_seconds=300, starter=starter) as runner:
            return runner.run(loop_jobs.train, str(tmp_path / folder), *arguments)

    results = [run("uninterrupted"), run("stopped", 1, 7), run("stopped", 99)]
    for of_worker in zip(*results, strict=True):
        check_same_bits(*of_worker)


def test_checkpoint_numbers_and_old_files(two, tmp_path):
    with two.scope():
        total = keras.Variable(0.0, trainable=False)
    manager = ks.CheckpointManager({"total": total}, tmp_path / "saved", max_to_keep=1)
    assert manager.restore_or_initialize() == 0
    manager.save()
    total.assign(3.0)
    manager.save()
    assert len(list((tmp_path / "saved").iterdir())) == 1
    total.assign(0.0)
    assert (manager.restore_or_initialize(), float(total)) == (2, 3.0)
    # A preemption handler counts from there.
    handler = ks.experimental.PreemptionCheckpointHandler(None, manager)
    assert handler.total_run_calls == 2


def test_bad_arguments_of_checkpoint_manager(two, tmp_path):
    with two.scope():
        total = keras.Variable(0.0, trainable=False)
    with pytest.raises(ValueError, match="`max_to_keep` must.*Received: max_to_keep=0"):
        ks.CheckpointManager({"total": total}, tmp_path, max_to_keep=0)
    with pytest.raises(ValueError, match="Received: 'step' of type int"):
        ks.CheckpointManager({"total": total, "step": 3}, tmp_path)
